"""Memory stays flat over many steps: driver and workers."""

import json
import threading
import time
from pathlib import Path

import psutil
import pytest
from runtime_jobs import Workshop, metrics, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

WARM_UP = 100
STEPS = 500
GROWTH = 1.05


def resident_mb(process: psutil.Process) -> float:
    return process.memory_info().rss / 1e6


class Sampler:
    """Notes the resident memory of this process and its workers at each step."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "metrics.jsonl"
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.found: dict[int, dict[str, float]] = {}

    def __enter__(self) -> "Sampler":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            time.sleep(0.05)
            if self._path.exists():
                step = self._path.read_bytes().count(b"\n")
                if step not in self.found:
                    self.found[step] = self._measure()

    def _measure(self) -> dict[str, float]:
        driver = psutil.Process()
        sizes = {"driver": resident_mb(driver)}
        for child in driver.children(recursive=True):
            command = " ".join(child.cmdline())
            if child.name() == "reward.worker":
                sizes[f"reward {child.pid}"] = resident_mb(child)
            elif "multiprocessing.forkserver" in command and "forked_from" not in command:
                sizes[f"worker {child.pid}"] = resident_mb(child)
        return sizes


@pytest.mark.parametrize("mode", ["exact", "race"])
def test_memory_stays_flat(tmp_path: Path, mode: str) -> None:
    shop = Workshop(tmp_path, rows=40)
    config = shop.config(
        "long", mode, steps=STEPS, train__learning_rate=1e-6, checkpoint={"every": 100}
    )
    with Sampler(tmp_path / "long") as sampler:
        folder, _ = run(config)
    assert len(metrics(folder)) == STEPS
    steps = sorted(sampler.found)
    first = sampler.found[min(s for s in steps if s >= WARM_UP)]
    last = sampler.found[max(s for s in steps if s <= STEPS - 2)]
    growth = {name: last[name] / first[name] for name in first}
    print(mode, json.dumps({n: [round(first[n], 1), round(last[n], 1)] for n in first}))
    print(mode, {name: round(ratio, 4) for name, ratio in growth.items()})
    assert len([name for name in growth if name.startswith("worker")]) == 2
    assert max(growth.values()) <= GROWTH
