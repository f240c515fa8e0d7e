"""Faults of all kinds at random moments, one after the other, in one run that mends itself."""

import os
import random
import signal
import threading
from io import StringIO
from pathlib import Path
from time import sleep
from typing import Any

import psutil
import pytest
from cluster_jobs import BEAT_S, Launcher, on, striking
from rich.console import Console
from runtime_jobs import Workshop, times_trained

from rollpacker import job
from rollpacker.core import journal
from rollpacker.job.run.stopping import Stopped
from rollpacker.policy.rollout import from_journal
from rollpacker.runtime.record.progress import Progress

pytestmark = [pytest.mark.cluster, pytest.mark.alone, pytest.mark.slow, pytest.mark.timeout(3600)]
FAULTS, ROWS, NODES = 50, 12, 4
CPU: dict[str, Any] = {"pin": False, "kind": "cpu"}
FOUR: dict[str, Any] = CPU | {"per_node": 1, "nodes": NODES, "layout": "separate", "training": 2}
KINDS = ("kill worker", "freeze worker", "kill agent", "freeze agent", "cut off")
shop = Workshop.fixture(rows=ROWS)


def strike(launcher: Launcher, kind: str, node: int) -> bool:
    """What is gone already cannot be struck."""
    try:
        match kind:
            case "kill worker":
                launcher.worker(node, 0).kill()
            case "freeze worker":
                launcher.worker(node, 0).suspend()
            case "kill agent":
                launcher.agent(node).kill()
            case "freeze agent":
                launcher.agent(node).suspend()
            case _:
                launcher.proxies[node].dropping.set()
    except (psutil.NoSuchProcess, IndexError):
        return False
    return True


class Saboteur(threading.Thread):
    """Strikes after every step or two, then ends the run by a signal."""

    def __init__(self, launcher: Launcher, folder: Path, seed: int) -> None:
        super().__init__(daemon=True)
        self.struck: list[str] = []
        self.over = threading.Event()
        self._launcher, self._folder, self._random = launcher, folder, random.Random(seed)

    def run(self) -> None:
        last = 0
        while len(self.struck) < FAULTS and not self.over.is_set():
            if done(self._folder) <= last:
                sleep(0.05)
                continue
            sleep(self._random.uniform(0.0, 3 * BEAT_S))
            kind, node = self._random.choice(KINDS), self._random.randrange(NODES)
            if strike(self._launcher, kind, node):
                self.struck.append(f"{kind} {node}")
                last = done(self._folder)
        while done(self._folder) < last + 10 and not self.over.is_set():
            sleep(0.05)
        if not self.over.is_set():
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("seed", [0])
def test_every_prompt_is_trained_once_an_epoch_whatever_happens(shop: Workshop, seed: int) -> None:
    name = f"soak-{seed}"
    wanted = shop.folder / f"{name}.wanted"
    Path(f"{wanted}.done").touch()
    changes: dict[str, Any] = {"devices": FOUR, "epochs": 10_000, "cluster__restarts": 10}
    changes |= {"deterministic": False, "slow": 0.1}
    config = striking(shop, name, wanted, 5, **changes)
    folder = Path(config.output)
    launcher = Launcher(proxy=True)
    saboteur = Saboteur(launcher, folder, seed)
    saboteur.start()
    said = StringIO()
    try:
        with on(launcher), pytest.raises(Stopped):
            job.train(config, progress=Progress(Console(file=said, width=400)))
    finally:
        saboteur.over.set()
    assert len(saboteur.struck) == FAULTS, saboteur.struck
    back, anew = (said.getvalue().count(what) for what in ("back from step", "starts again from"))
    print(f"{FAULTS} faults: {back} times back, {anew} times anew, {done(folder)} steps")
    assert back >= FAULTS // 5
    counts = times_trained(folder)
    assert max(counts.values()) - min(counts.get(f"p{n}", 0) for n in range(ROWS)) <= 1
    assert sum(counts.values()) == 4 * done(folder)
    assert journal.replay(folder / "journal.jsonl", from_journal).differences == []


def done(folder: Path) -> int:
    """Steps with a checkpoint."""
    return max((int(p.name.split("-")[1]) for p in folder.glob("checkpoint-*")), default=0)
