"""From one result a test to the verdict on a program."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from rollpacker.sandbox.types import Level, Outcome, Test, TestResult, Verdict


def budgets_of(tests: Sequence[Test], timeout_s: float | Sequence[float]) -> Sequence[float]:
    """Seconds of each test. Raises ``ValueError`` without tests or with an unfit timeout."""
    budgets = [timeout_s] * len(tests) if isinstance(timeout_s, int | float) else timeout_s
    if not tests or len(budgets) != len(tests) or not all(0 < t < math.inf for t in budgets):
        raise ValueError(
            "a sandbox needs tests and timeout_s > 0, one or as many as tests, "
            f"got {len(tests)} tests and timeout_s={timeout_s}"
        )
    return budgets


def verdict_of(
    results: Sequence[TestResult], *, level: Level | Literal["remote"], forgeable: bool
) -> Verdict:
    """The verdict on a program that had these results."""
    wrong: list[Outcome] = [each.verdict for each in results if each.verdict != "pass"]
    return Verdict(
        verdict="infra" if "infra" in wrong else wrong[0] if wrong else "pass",
        tests=tuple(results),
        level=level,
        cpu_s=sum(each.cpu_s for each in results),
        forgeable=forgeable,
    )
