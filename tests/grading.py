"""Grading without an event loop, for tests that look at grades alone."""

from collections.abc import Sequence

from rollpacker.reward.base import Grade, GradeRequest
from rollpacker.reward.processes.pool import GradingPool


def grade_now(
    pool: GradingPool, requests: Sequence[GradeRequest], group: bool = False
) -> list[Grade]:
    """Grade and wait, with a pool that no loop was attached to; in the order of ``requests``."""
    pool.submit(requests, group)
    wanted = [request.attempt for request in requests]
    while not {*wanted} <= {grade.attempt for grade in pool._ledger.done}:
        pool._pump(0.05)
    grades = {grade.attempt: grade for grade in pool._ledger.done}
    pool._ledger.done = []
    return [grades[attempt] for attempt in wanted]
