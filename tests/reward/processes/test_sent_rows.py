"""Large rows: sent once to a process, dropped again, and each response's own."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from pool_helpers import collect, processes_of, requests

from rollpacker.config import GradingConfig, RewardConfig
from rollpacker.core.types import AttemptId
from rollpacker.processes.frames import HEADER
from rollpacker.reward.base import Grade, GradeRequest
from rollpacker.reward.processes.pool import GradingPool
from rollpacker.reward.processes.process import GradingJob, GradingProcess
from rollpacker.reward.processes.rows import ABOUT_A_ROW, LARGE, KeptRows, SentRows
from rollpacker.reward.processes.worker import _job

MOST = 3 * LARGE
ROWS: list[dict[str, Any]] = [
    {"answer": str(n), "tests": ["x" * size]}
    for n, size in enumerate((0, 100, LARGE, LARGE + 9, LARGE, 2 * LARGE, MOST + 1))
]


def request(row: dict[str, Any], attempt: int = 0) -> GradeRequest:
    return GradeRequest(attempt=AttemptId(attempt), prompt="p", completion_ids=[1], row=row)


def frames(data: bytes) -> list[bytes]:
    found: list[bytes] = []
    while data:
        (size,) = HEADER.unpack_from(data)
        found.append(data[HEADER.size : HEADER.size + size])
        data = data[HEADER.size + size :]
    return found


class Processes(RuleBasedStateMachine):
    """Two of them, which get jobs, end, and are told at a step's end."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = SentRows(MOST)
        self.kept = {"x": KeptRows(), "y": KeptRows()}
        self.newest = dict.fromkeys("xy", 0)

    @rule(
        process=st.sampled_from("xy"),
        places=st.lists(st.integers(0, len(ROWS) - 1), min_size=1, max_size=4),
    )
    def send(self, process: str, places: list[int]) -> None:
        rows = [ROWS[place] for place in places]
        job = GradingJob(7, tuple(request(row, n) for n, row in enumerate(rows)), [0])
        *about, last = frames(job.encode(self.sent, process))
        for each in about:
            assert each.startswith(ABOUT_A_ROW)
            self.kept[process].take(each)
        assert not last.startswith(ABOUT_A_ROW)
        functions, made = _job(last, None, self.kept[process])
        assert functions == [0]
        assert [each.row for each in made] == rows
        self.newest[process] = sum(len(str(ROWS[place])) for place in set(places))

    @rule(process=st.sampled_from("xy"))
    def end(self, process: str) -> None:
        self.sent.lost(process)
        self.kept[process] = KeptRows()
        self.newest[process] = 0

    @rule()
    def end_step(self) -> None:
        for process, about in self.sent.forget().items():
            assert isinstance(process, str)
            for each in frames(b"".join(about)):
                self.kept[process].take(each)
        assert [rows._packed for rows in self.kept.values()] == [{}, {}]

    @invariant()
    def what_is_kept_is_bounded(self) -> None:
        for process, rows in self.kept.items():
            held = sum(map(len, rows._packed.values()))
            assert held <= MOST + self.newest[process] + 1000
        assert sum(large.size for large in self.sent._large.values()) <= MOST


TestProcesses = Processes.TestCase
TestProcesses.settings = settings(max_examples=settings().max_examples // 4)

REWARDS = """
import os, signal

def length(completions, tests, **_):
    found = [float(sum(map(len, each))) for each in tests]
    for each in tests:
        each.clear()  # what a function does to its row is no other response's
    return found

def dies(completions, tests, marker, **_):
    if completions[0] == "kill" and not os.path.exists(marker):
        open(marker, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    return [float(sum(map(len, each))) for each in tests]
"""


class Counting(GradingPool):
    """Counts what it writes."""

    written = 0

    def _write(self, process: GradingProcess, frames: Sequence[bytes]) -> None:
        self.written += sum(map(len, frames))
        super()._write(process, frames)


@pytest.fixture
def pool_of(tmp_path: Path) -> Callable[..., Counting]:
    file = tmp_path / "rewards.py"
    file.write_text(REWARDS)

    def made(name: str, workers: int, **options: Any) -> Counting:
        rewards = [RewardConfig(function=f"{file}:{name}", options=options)]
        return Counting(rewards, GradingConfig(workers=workers, retries=2))

    return made


def group(row: dict[str, Any], texts: Sequence[str], first: int = 0) -> list[GradeRequest]:
    """Responses of one prompt, as a run has them: their row is one object."""
    return [
        GradeRequest(
            attempt=each.attempt,
            prompt="p",
            completion=each.text,
            completion_ids=[1],
            row=row,
            source="one",
        )
        for each in requests(texts, first)
    ]


def graded(pool: Counting, many: list[GradeRequest]) -> list[Grade]:
    """Submitted one by one, as they finish in a run; the pool stays open."""
    pool.wait_ready()

    def feed() -> None:
        for each in many:
            pool.submit([each])

    return asyncio.run(collect(pool, feed, len(many)))


def test_a_large_row_goes_to_each_process_once(pool_of: Callable[..., Counting]) -> None:
    with closing(pool_of("length", 2)) as pool:
        grades = graded(pool, group({"tests": ["x" * 1_000_000]}, ["a"] * 16))
        assert [grade.reward for grade in grades] == [1e6] * 16
        assert 1_000_000 < pool.written < 2_100_000
        assert len(pool._waiting.rows.forget()) in (1, 2)
        assert pool._waiting.rows.forget() == {}


def test_a_process_that_comes_after_another_gets_the_row_again(
    pool_of: Callable[..., Counting], tmp_path: Path
) -> None:
    with closing(pool_of("dies", 1, marker=str(tmp_path / "died"))) as pool:
        (before,) = processes_of(pool)
        row = {"tests": ["x" * 1_000_000]}
        grades = graded(pool, group(row, ["a", "b", "kill", "c", "d"]))
        assert [grade.reward for grade in grades] == [1e6] * 5
        assert processes_of(pool) != [before]
        assert 2_000_000 < pool.written < 3_100_000


def test_small_rows_are_sent_as_before(pool_of: Callable[..., Counting]) -> None:
    with closing(pool_of("length", 1)) as pool:
        graded(pool, group({"tests": ["x" * 100]}, ["a"] * 16))
        assert pool._waiting.rows.forget() == {}
        assert pool.written < 16 * 1000
