"""How many of the waiting responses are judged together, and how many layers stay resident."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rollpacker.policy.grading.judge_budget import JudgePlan

Planner = Callable[[Sequence[int]], JudgePlan | None]
"""Takes waiting lengths in tokens, ascending; None when not even the shortest fits."""


def capped(decide: Planner, batch_tokens: int) -> Planner:
    """What ``decide`` says, with batches of ``batch_tokens`` padded tokens (or one response)."""

    def plan(lengths: Sequence[int]) -> JudgePlan | None:
        decided = decide(lengths)
        if decided is None:
            return None
        count = min(decided.concurrency, _fitting(lengths, batch_tokens))
        return JudgePlan(concurrency=count, resident=decided.resident)

    return plan


def _fitting(lengths: Sequence[int], batch_tokens: int) -> int:
    """How many of the shortest make a batch: the longest of them counts for each."""
    count = 1
    while count < len(lengths) and (count + 1) * lengths[count] <= batch_tokens:
        count += 1
    return count
