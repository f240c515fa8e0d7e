import asyncio
import time
from collections.abc import Callable, Sequence

from rollpacker.core.types import AttemptId
from rollpacker.reward.base import Grade, GradeRequest
from rollpacker.reward.pool import GradingPool


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


def wait_until(true: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)
