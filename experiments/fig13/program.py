"""A reward that takes CPU time, as running a program against a test case does.

A right answer's program runs for a time that the row gives: ``UNIT_S`` for each unit of its larger
number. A wrong one never ends and is stopped at the test case's timeout: the longest one, or the
one that the package's policy adapts to the right answers so far (RollPacker, section 4.3), both
a thousandth of the paper's.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rollpacker.config import CodeTimeoutConfig
from rollpacker.policy.grading import AdaptiveTimeouts

UNIT_S = 20e-6
LEAST_S, MOST_S = 0.002, 0.03
_timeouts = AdaptiveTimeouts(CodeTimeoutConfig(least_s=LEAST_S, most_s=MOST_S))


def reward(
    completions: Sequence[str],
    id: Sequence[str],
    answer: Sequence[str],
    metadata: Sequence[Mapping[str, Any]],
    adaptive: bool,
) -> list[float]:
    """1 for a right answer after ``</think>``, else 0; takes its time."""
    scores: list[float] = []
    for one in zip(completions, id, answer, metadata, strict=True):
        passed, spent = _run(*one, adaptive)
        burn(spent)
        scores.append(float(passed))
    return scores


def seconds(
    completions: Sequence[str],
    id: Sequence[str],
    answer: Sequence[str],
    metadata: Sequence[Mapping[str, Any]],
    adaptive: bool,
) -> list[float]:
    """What ``reward`` takes for each, without taking it: a metric, of weight 0.

    Each function has a copy of this module and sees the same calls, so their timeouts agree.
    """
    rows = zip(completions, id, answer, metadata, strict=True)
    return [_run(*one, adaptive)[1] for one in rows]


def _run(
    text: str, case: str, right: str, row: Mapping[str, Any], adaptive: bool
) -> tuple[bool, float]:
    """Whether the program ends in time with the right answer, and its CPU seconds."""
    correct = text.partition("</think>")[2].strip() == right
    limit = _timeouts.timeout(case) if adaptive else MOST_S
    needed = UNIT_S * max(row["numbers"]) if correct else limit
    passed = correct and needed <= limit
    _timeouts.observe(case, needed, passed)
    return passed, min(needed, limit)


def burn(seconds: float) -> None:
    """Use up CPU time of this process."""
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass
