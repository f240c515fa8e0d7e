"""When a supervised pool starts processes again."""

import time
from itertools import pairwise

import pytest

from fuzzing import Child, kill
from rollpacker.processes import supervised
from rollpacker.processes.frames import Channel
from rollpacker.processes.supervised import SupervisedPool, SupervisedProcess


class Process(SupervisedProcess):
    @property
    def busy(self) -> bool:
        return False


class Pool(SupervisedPool[Process]):
    """One process, which dies of what it is told."""

    def __init__(self) -> None:
        super().__init__("things: its processes", 9)
        self.children: list[Child] = []
        self._fill()

    def _new(self) -> Process:
        self.children.append(Child())
        return Process(self.children[-1], Channel(self.children[-1].ours), 0.0)  # type: ignore[arg-type]

    def _missing(self) -> int:
        return 1 - len(self._members)

    def _heard(self, member: Process, data: bytes) -> None:
        self._is_ready(member)

    def _late(self, member: Process, now: float) -> None:
        return None

    def _lost(self, member: Process, why: str, ended: str) -> None:
        self._say(ended)

    def _working(self) -> bool:
        return False

    def _go_on(self) -> None:
        pass


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The clock."""
    clock = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(supervised.SupervisedProcess, "kill", kill)
    return clock


def starts(pool: Pool, clock: list[float], deaths: int) -> list[float]:
    """Seconds from each death of an idle process to the next start."""
    found: list[float] = []
    for _death in range(deaths):
        died, count = clock[0], len(pool.children)
        pool.children[-1].alive = False
        pool._check()
        while len(pool.children) == count and pool.broken is None:
            clock[0] += 0.05
            pool._check()
        found.append(round(clock[0] - died, 2))
    return found


def test_deaths_in_vain_are_further_and_further_apart(now: list[float]) -> None:
    pool = Pool()
    waited = starts(pool, now, 8)
    assert waited[0] == 0.0
    assert all(a <= b for a, b in pairwise(waited))
    assert waited[1] > 0.0
    assert waited[-1] == pytest.approx(5.0, abs=0.1)
    assert starts(pool, now, 2)[-1] == 0.0  # given up with the ninth
    assert pool.broken == "things: its processes do not start: the last was killed"


def test_those_that_start_are_never_given_up_and_time_forgives(now: list[float]) -> None:
    pool = Pool()
    for _ in range(20):
        pool.children[-1].write(b"ready")
        pool._check()
        starts(pool, now, 1)
    assert pool.broken is None
    now[0] += 100.0
    assert starts(pool, now, 2) == [0.0, pytest.approx(0.2, abs=0.06)]
