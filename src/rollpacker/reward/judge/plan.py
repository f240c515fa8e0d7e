"""How many of the waiting responses are judged together, and how many layers stay resident."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rollpacker.policy.rewards import JudgeBudget, JudgePlan

Planner = Callable[[Sequence[int]], JudgePlan | None]
"""Takes waiting lengths in tokens, ascending; None when not even the shortest fits."""


def fixed_plan(resident: int, *, most: int, batch_tokens: int) -> Planner:
    """Always the same layers; a batch has at most ``most`` responses and ``batch_tokens``
    padded tokens (or one response)."""

    def plan(lengths: Sequence[int]) -> JudgePlan | None:
        if not lengths:
            return None
        return JudgePlan(concurrency=min(most, _fitting(lengths, batch_tokens)), resident=resident)

    return plan


def budgeted_plan(
    budget: JudgeBudget, free_bytes: Callable[[], float], *, batch_tokens: int
) -> Planner:
    """What the policy decides from the lengths and the memory that is free now.

    Args:
        budget: the policy.
        free_bytes: memory that the judge may use, what it holds already included.
        batch_tokens: most padded tokens of several responses.
    """

    def plan(lengths: Sequence[int]) -> JudgePlan | None:
        decided = budget.decide(lengths, free_bytes())
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
