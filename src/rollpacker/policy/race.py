"""The race of one prompt: its attempts, and which of them count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rollpacker.core.types import AttemptId, Prompt

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
    """Attempts of one prompt in one round.

    Args:
        prompt: whose responses race.
        wanted: graded attempts that complete the group.
        audit: never aborted, so that its lengths are an unbiased sample.
    """

    prompt: Prompt
    wanted: int
    audit: bool = False
    decoding: dict[AttemptId, int] = field(default_factory=dict[AttemptId, int])
    """Running attempts and their sample index."""
    waiting: dict[AttemptId, int] = field(default_factory=dict[AttemptId, int])
    """Finished attempts that are graded when the whole round has finished."""
    grading: dict[AttemptId, int] = field(default_factory=dict[AttemptId, int])
    """Finished attempts whose reward is on its way."""
    graded: dict[AttemptId, tuple[int, float | None]] = field(
        default_factory=dict[AttemptId, tuple[int, float | None]]
    )
    """Sample index and reward, None where no function applies, of the attempts that came in time,
    in order of grading."""
    next_index: int = 0
    failures: int = 0
    done: bool = False

    @property
    def live(self) -> list[AttemptId]:
        """Attempts that still cost something, oldest first."""
        return sorted([*self.decoding, *self.waiting, *self.grading])

    def forget(self, attempt: AttemptId) -> int | None:
        """Take an attempt out of the race; its sample index, None if it was not live."""
        for stage in (self.decoding, self.waiting, self.grading):
            if attempt in stage:
                return stage.pop(attempt)
        return None

    @property
    def idle(self) -> bool:
        """Whether nothing of it costs anything any more."""
        return not (self.decoding or self.waiting or self.grading)

    @property
    def complete(self) -> bool:
        """Whether enough attempts are graded."""
        return len(self.graded) >= self.wanted

    def kept(self) -> tuple[AttemptId, ...]:
        """The first ``wanted`` graded attempts, by sample index."""
        first = list(self.graded)[: self.wanted]
        return tuple(sorted(first, key=lambda attempt: self.graded[attempt][0]))

    def informative(self, least: float) -> bool:
        """Whether the kept rewards differ (``differ``)."""
        rewards = [self.graded[attempt][1] for attempt in self.kept()]
        return differ([reward for reward in rewards if reward is not None], least)
