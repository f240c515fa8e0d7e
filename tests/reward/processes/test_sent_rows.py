"""Large rows: written to a file once, deleted again, and each response's own."""

import asyncio
import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pool_helpers import collect, requests

from rollpacker.config import GradingConfig, RewardConfig
from rollpacker.reward.base import Grade, GradeRequest
from rollpacker.reward.processes.pool import GradingPool
from rollpacker.reward.processes.process import LARGE, GradingJob, GradingProcess, RowFiles

REWARDS = """
import os, signal

def length(completions, tests, marker=None, **_):
    if marker and completions[0] == "kill" and not os.path.exists(marker):
        open(marker, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    found = [float(sum(map(len, each))) for each in tests]
    for each in tests:
        each.clear()  # what a function does to its row is no other response's
    return found
"""


class Counting(GradingPool):
    """Counts what it writes."""

    written = 0

    def _write(self, process: GradingProcess, frames: Sequence[bytes]) -> None:
        self.written += sum(map(len, frames))
        super()._write(process, frames)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where files of rows are."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def files(folder: Path) -> int:
    """Of large rows."""
    return len(list(folder.glob("rollpacker-row-*")))


def of_one_row(size: int, texts: Sequence[str]) -> list[GradeRequest]:
    """Responses of one prompt, as a run has them: their row is one object."""
    row = {"tests": ["x" * size]}
    return [replace(each, row=row) for each in requests(texts)]


def graded(folder: Path, many: list[GradeRequest], workers: int, **options: Any) -> Counting:
    """Submitted one by one, as they finish in a run."""
    file = folder / "rewards.py"
    file.write_text(REWARDS)
    reward = RewardConfig(function=f"{file}:length", options=options)
    pool = Counting([reward], GradingConfig(workers=workers, retries=2))
    with closing(pool):
        pool.wait_ready()

        def feed() -> None:
            for each in many:
                pool.submit([each])

        grades: list[Grade] = asyncio.run(collect(pool, feed, len(many)))
        assert {each.reward for each in grades} == {float(len(many[0].row["tests"][0]))}
        pool.end_step()
        assert not files(folder)
    return pool


@pytest.mark.parametrize(("size", "most"), [(100, 16_000), (1_000_000, 16_000)])
def test_a_large_row_is_not_sent_with_each_job(folder: Path, size: int, most: int) -> None:
    assert graded(folder, of_one_row(size, ["a"] * 16), 2).written < most


def test_a_process_that_comes_after_another_reads_the_row_too(folder: Path) -> None:
    marker = folder / "died"
    graded(folder, of_one_row(1_000_000, ["a", "kill", "b", "c"]), 1, marker=str(marker))
    assert marker.exists()


def test_files_are_bounded_and_stay_for_jobs_that_were_sent(folder: Path) -> None:
    rows = RowFiles(most=3 * LARGE)
    jobs = [GradingJob(n, (each,), [0]) for n in range(4) for each in of_one_row(LARGE, "a")]
    frames = [job.encode(rows) for job in jobs]
    assert max(map(len, frames)) < 1000
    assert files(folder) == 4
    jobs = jobs[1:]
    assert files(folder) == 3
    rows.forget()
    assert files(folder) == 3
    jobs.clear()
    assert files(folder) == 0


def test_a_row_without_room_on_the_disk_goes_with_its_job(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(**_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(tempfile, "mkstemp", full)
    assert graded(folder, of_one_row(1_000_000, ["a"] * 2), 1).written > 2_000_000
