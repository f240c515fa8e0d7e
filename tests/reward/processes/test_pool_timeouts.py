import time
from collections.abc import Iterator

from pool_helpers import requests

from grading import grade_now
from rollpacker.config import GradingConfig, RewardConfig
from rollpacker.core.types import AttemptId
from rollpacker.reward.base import GradeRequest
from rollpacker.reward.processes.pool import GradingPool

BUSY = "```python\nsum(range(8_000_000))\nprint(1)\n```"


class Watched(list[float]):
    """Timeouts that remember when they were read."""

    read: float = 0.0

    def __iter__(self) -> Iterator[float]:
        self.read = time.monotonic()
        return super().__iter__()


def test_timeouts_are_those_of_the_moment_that_a_program_is_sent() -> None:
    row = {"tests": [{"stdin": "", "stdout": "1\n"}]}
    timeouts = [Watched([20.0]), Watched([20.0])]
    asked = [
        GradeRequest(
            attempt=AttemptId(place),
            prompt="?",
            completion=BUSY,
            completion_ids=[],
            row=row,
            timeouts_s=given,
        )
        for place, given in enumerate(timeouts)
    ]
    pool = GradingPool([RewardConfig(function="code")], GradingConfig(workers=1))
    try:
        pool.wait_ready()
        grades = grade_now(pool, asked)
    finally:
        pool.close()
    assert [grade.reward for grade in grades] == [1.0, 1.0]
    took = grades[0].runs["code"].cpu_s[0]
    assert timeouts[1].read - timeouts[0].read >= took > 0.01


def test_a_comparison_that_is_cut_off_scores_0_where_seconds_are_long() -> None:
    """Its limit is CPU seconds; the pool's, in wall seconds, is on a silent process."""
    math = RewardConfig(function="math", options={"time_limit": 2.5}, timeout_s=1.5)
    pool = GradingPool([math], GradingConfig(workers=1))
    try:
        pool.wait_ready()
        (grade,) = grade_now(pool, requests([r"\boxed{(a+b+c+d+e+f)^{60}}"], answer="(x+y)^{50}"))
    finally:
        pool.close()
    assert (grade.reward, grade.error) == (0.0, None)
