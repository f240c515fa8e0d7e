"""Whole runs over several nodes, and what happens to them there."""

import asyncio
import re
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from time import sleep
from typing import Any

import psutil
import pytest
from cluster_jobs import BEAT_S, Launcher, on, striking, struck
from runtime_jobs import Workshop, checkpoints, kept_samples, run, times_trained, weights_digest

from rollpacker.core import journal
from rollpacker.policy.rollout import from_journal
from rollpacker.runtime.messages.faults import WorkerError
from rollpacker.runtime.step.phase_nodes import OwnNodes, Tenant

pytestmark = [pytest.mark.cluster, pytest.mark.alone]
ROWS = 12
ONCE = Counter({f"p{i}": 1 for i in range(ROWS)})
CPU: dict[str, Any] = {"pin": False, "kind": "cpu"}
ENGINE_AND_REPLICA: dict[str, Any] = {
    "devices": CPU | {"per_node": 1, "nodes": 2, "layout": "separate", "training": 1}
}
FOUR: dict[str, Any] = {
    "devices": CPU | {"per_node": 1, "nodes": 4, "layout": "separate", "training": 2}
}
SPANNED: dict[str, Any] = {
    "devices": CPU | {"per_node": 1, "nodes": 3, "layout": "separate", "training": 2},
    "trainer": {"kind": "fsdp", "shard": 2},
}
shop = Workshop.fixture(rows=ROWS)


@pytest.fixture(scope="module")
def here(shop: Workshop) -> Path:
    """One engine and one replica on this machine."""
    wanted = shop.folder / "here.wanted"
    Path(f"{wanted}.done").touch()
    devices = CPU | {"per_node": 2, "layout": "separate", "training": 1}
    return run(striking(shop, "here", wanted, 5, devices=devices))[0]


def digest(folder: Path) -> str:
    return weights_digest(folder / f"checkpoint-{checkpoints(folder)[-1]}")


def nothing(_launcher: Launcher) -> None:
    pass


def test_nodes_change_nothing(shop: Workshop, here: Path) -> None:
    folder, _ = struck(shop, Launcher(), "two", nothing, **ENGINE_AND_REPLICA)
    assert kept_samples(folder) == kept_samples(here)
    assert digest(folder) == digest(here)


@pytest.mark.parametrize(("name", "layout"), [("spanned", SPANNED), ("four", FOUR)])
def test_a_replica_may_span_nodes_and_two_reduce_over_the_network(
    shop: Workshop, here: Path, name: str, layout: dict[str, Any]
) -> None:
    folder, _ = struck(shop, Launcher(), name, nothing, **layout)
    assert times_trained(folder) == ONCE
    first = [row for row in kept_samples(folder) if row[0] == 0]
    assert first == [row for row in kept_samples(here) if row[0] == 0]


Strike = Callable[[Launcher], object]
STRIKES: dict[str, tuple[Strike, str]] = {
    "engine killed": (lambda it: it.worker(0, 0).kill(), r"worker 0 died: .* on node 0"),
    "engine frozen": (lambda it: it.worker(0, 0).suspend(), "worker 0 died: it gave no sign"),
    "replica killed": (lambda it: it.worker(2, 0).kill(), r"worker 2 died: .* on node 2"),
    "replica frozen": (lambda it: it.worker(3, 0).suspend(), "worker 3 died: it gave no sign"),
    "rollout node killed": (lambda it: it.agent(1).kill(), "worker 1 died: its node 1 .* is gone"),
    "training node killed": (lambda it: it.agent(2).kill(), "worker 2 died: its node 2 .* is gone"),
    "agent frozen": (
        lambda it: (it.agent(1).suspend(), sleep(4 * BEAT_S)),
        "worker 1 died: its node 1 .* is gone",
    ),
    "node cut off": (
        lambda it: (it.proxies[1].dropping.set(), sleep(4 * BEAT_S)),
        "worker 1 died: (its node 1 .* is gone|it gave no sign)",
    ),
}


RARELY = ("engine frozen", "agent frozen", "replica killed", "rollout node killed")
"""Are noticed as "replica frozen", "node cut off", "engine killed" and "training node killed" are;
a killed rollout node comes back below."""


@pytest.mark.parametrize(
    "what",
    [pytest.param(each, marks=pytest.mark.slow if each in RARELY else ()) for each in STRIKES],
)
def test_one_of_two_is_survived(shop: Workshop, what: str) -> None:
    strike, said = STRIKES[what]
    launcher = Launcher(proxy=what == "node cut off")
    folder, lines = struck(shop, launcher, what.replace(" ", "-"), strike, **FOUR)
    assert re.search(said, lines), lines
    assert times_trained(folder) == ONCE
    assert journal.replay(folder / "journal.jsonl", from_journal).differences == []


@pytest.mark.parametrize(
    "node",
    [
        pytest.param(0, id="the engine's", marks=pytest.mark.slow),
        pytest.param(1, id="the replica's"),
    ],
)
def test_the_last_of_a_kind_ends_the_run_which_goes_on_exactly(
    shop: Workshop, here: Path, node: int
) -> None:
    name = f"last-{node}"
    with pytest.raises(WorkerError, match=rf"its node {node} .* is gone"):
        struck(shop, Launcher(), name, lambda it: it.agent(node).kill(), **ENGINE_AND_REPLICA)
    folder, _ = struck(shop, Launcher(), name, nothing, resume=True, **ENGINE_AND_REPLICA)
    assert times_trained(folder) == ONCE
    assert kept_samples(folder) == kept_samples(here)
    assert digest(folder) == digest(here)


BACK: dict[str, tuple[Strike, str]] = {
    "replica frozen": (STRIKES["replica frozen"][0], "replica 1: back from step"),
    "rollout node killed": (STRIKES["rollout node killed"][0], "engine 1: back from step"),
}
"""The soak strikes in all ways."""
LONG = ("replica frozen",)


@pytest.mark.parametrize(
    "what", [pytest.param(each, marks=pytest.mark.slow if each in LONG else ()) for each in BACK]
)
def test_what_is_lost_comes_back(shop: Workshop, what: str) -> None:
    """An agent in the place of one that is gone; what the old one still does is of no effect."""
    strike, said = BACK[what]
    launcher = Launcher()
    name = f"back-{what.replace(' ', '-')}"
    changes = {"cluster__restarts": 3, "epochs": 6, "slow": 0.1}
    folder, lines = struck(shop, launcher, name, strike, **FOUR, **changes)
    assert said in lines, lines
    assert times_trained(folder) == Counter({f"p{i}": 6 for i in range(ROWS)})
    assert journal.replay(folder / "journal.jsonl", from_journal).differences == []


@pytest.mark.parametrize("there", ["nothing", "another run's"])
def test_a_node_that_does_not_see_the_runs_folder_is_refused(shop: Workshop, there: str) -> None:
    config = shop.config(f"hidden-{there[:4]}", **ENGINE_AND_REPLICA)
    out = Path(config.output)
    out.parent.mkdir(exist_ok=True)
    hidden = f"mount -t tmpfs none {out.parent}"
    if there != "nothing":
        hidden += f" && mkdir {out} && touch {out}/.nodes"
    alone = ["unshare", "--mount", "sh", "-c", f'{hidden} && exec "$@"', "sh"]
    if not shutil.which("unshare") or subprocess.run([*alone, "true"], check=False).returncode:
        pytest.skip("no mount namespaces here")
    said = r"^node \d: \S+ is not the run's there: 'output' must be on a disk that all nodes see$"
    with on(Launcher(alone)), pytest.raises(ValueError, match=said):
        run(config)
    assert not [*out.glob("samples*")]


def test_what_is_wrong_on_a_node_is_said_with_its_name(shop: Workshop) -> None:
    config = shop.config("wrong", **ENGINE_AND_REPLICA | {"devices__kind": "cuda"})
    with on(Launcher()), pytest.raises(ValueError, match=r"^node \d: devices.kind is 'cuda' but"):
        run(config)


class Fenced(OwnNodes):
    """Lets the test say until when workers on other nodes may run."""

    def __init__(self) -> None:
        super().__init__()
        self._fence: Any = None

    async def open(self, tenant: Tenant, *_hooks: Any) -> None:
        loop = asyncio.get_running_loop()
        self._fence = lambda stop_at: loop.call_soon_threadsafe(tenant.fence, stop_at)

    def fence(self, stop_at: float | None) -> None:
        self._fence(stop_at)


def test_workers_on_other_nodes_stand_still_when_a_lease_is_lost(
    shop: Workshop, here: Path
) -> None:
    """At its end, though nobody says so; they are not taken for dead, and go on with the next."""
    phases, still = Fenced(), list[bool]()

    def stopped(launcher: Launcher) -> bool:
        workers = [launcher.worker(node, 0) for node in (0, 1)]
        return all(worker.status() == psutil.STATUS_STOPPED for worker in workers)

    def strike(launcher: Launcher) -> None:
        phases.fence(time.monotonic() + BEAT_S)
        sleep(BEAT_S / 2)
        still.append(stopped(launcher))
        sleep(BEAT_S)
        still.append(stopped(launcher))
        phases.fence(0.0)
        sleep(4 * BEAT_S)
        still.append(stopped(launcher))
        phases.fence(time.monotonic() + 60.0)
        sleep(BEAT_S / 2)
        still.append(stopped(launcher))
        phases.fence(None)

    folder, said = struck(shop, Launcher(), "fenced", strike, phases=phases, **ENGINE_AND_REPLICA)
    assert still == [False, True, True, False]
    assert "died" not in said
    assert kept_samples(folder) == kept_samples(here)
    assert digest(folder) == digest(here)
