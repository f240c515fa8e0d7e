"""The race of one prompt: which of its attempts count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rollpacker.core.types import AttemptId, Prompt
from rollpacker.policy.ledger import Attempt

_ROUNDING = 1e-6
"""Rewards that differ by no more than this share of the largest are equal: some float32 steps."""


def differ(rewards: Sequence[float], least: float) -> bool:
    """Whether a group's rewards teach anything: by their range, which rounding cannot fool.

    ``least`` is ``rollout.min_reward_range``; 0 leaves out rounding only.
    """
    if not rewards:
        return False
    spread = max(rewards) - min(rewards)
    return spread >= least if least > 0.0 else spread > _ROUNDING * max(map(abs, rewards))


@dataclass(slots=True)
class Race:
    """One prompt in one round.

    Args:
        prompt: whose responses race.
        wanted: graded attempts that complete the group.
        audit: never aborted, so that its lengths are an unbiased sample.
    """

    prompt: Prompt
    wanted: int
    audit: bool = False
    graded: list[Attempt] = field(default_factory=list[Attempt])
    """Attempts that came in time, in order of grading."""
    next_index: int = 0
    failures: int = 0
    done: bool = False

    @property
    def complete(self) -> bool:
        """Whether enough attempts are graded."""
        return len(self.graded) >= self.wanted

    def kept(self) -> tuple[AttemptId, ...]:
        """The first ``wanted`` graded attempts, by sample index."""
        first = sorted(self.graded[: self.wanted], key=lambda attempt: attempt.index)
        return tuple(attempt.id for attempt in first)

    def informative(self, least: float) -> bool:
        """Whether the kept rewards differ (``differ``)."""
        rewards = [attempt.reward for attempt in self.graded[: self.wanted]]
        return differ([reward for reward in rewards if reward is not None], least)
