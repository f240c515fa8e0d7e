import asyncio
import os
import time
from collections.abc import Callable, Sequence

from rollpacker.core.types import AttemptId
from rollpacker.reward.base import Grade, GradeRequest
from rollpacker.reward.processes.pool import GradingPool


def requests(texts: Sequence[str], first: int = 0, **row) -> list[GradeRequest]:
    return [
        GradeRequest(
            attempt=AttemptId(first + i),
            prompt="p",
            completion=text,
            completion_ids=[1],
            row={"answer": "1"} | row,
            source=f"row {first + i}",
        )
        for i, text in enumerate(texts)
    ]


async def collect(pool: GradingPool, feed: Callable[[], None], count: int) -> list[Grade]:
    """Attach to this loop, feed, and wait for ``count`` grades."""
    grades: list[Grade] = []
    enough = asyncio.Event()

    def on_grades(some: list[Grade]) -> None:
        grades.extend(some)
        if len(grades) >= count:
            enough.set()

    pool.attach(asyncio.get_running_loop(), on_grades)
    feed()
    await asyncio.wait_for(enough.wait(), 60)
    return grades


def processes_of(pool: GradingPool) -> list[int]:
    """Oldest first."""
    return [process.popen.pid for process in pool._processes]


def grading_processes() -> list[int]:
    """Of all pools of this process, oldest first; it may have other children."""
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        pids = [int(child) for child in file.read().split()]
    return [pid for pid in pids if "reward.worker" in command(pid)]


def command(pid: int) -> str:
    """Of a process; empty when it is gone."""
    try:
        with open(f"/proc/{pid}/cmdline") as file:
            return file.read()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def wait_until(true: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)
