import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from rollpacker.core.types import AttemptId
from rollpacker.reward.base import Grade, GradeRequest
from rollpacker.reward.processes.pool import GradingPool

CODE = (Path(__file__).parents[1] / "cases" / "characters.txt").read_text(encoding="utf-8")
"""Rewards of all kinds of character."""


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
    return [process.popen.pid for process in pool._members]


def grading_processes() -> list[int]:
    """Of all pools of this process, oldest first; it may have other children."""
    found = psutil.Process().children(recursive=True)
    named = [child for child in found if name(child) == "reward.worker"]
    return [child.pid for child in sorted(named, key=lambda child: child.pid)]


def name(process: psutil.Process) -> str:
    """Of a process; empty when it is gone."""
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return ""
