"""The reward that an environment gave, beside those of the reward functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from rollpacker.config import EnvironmentConfig
from rollpacker.core.types import AttemptId
from rollpacker.reward.base import Grade
from rollpacker.runtime.attempts import Attempt

NAME = "environment"
"""Of the reward in metrics and samples."""


class EnvironmentReward:
    """Adds it to the grades of the responses that have one.

    Args:
        config: of the environment; None where there is none.
        alone: there are no reward functions: an episode that was given nothing has a reward of 0.
    """

    def __init__(self, config: EnvironmentConfig | None, *, alone: bool) -> None:
        self._config = config
        self._alone = alone
        self._given: dict[AttemptId, float | None] = {}

    def note(self, attempts: Iterable[Attempt]) -> list[Attempt]:
        """Responses are about to be graded; those that reward functions are to see."""
        if self._config is None:
            return list(attempts)
        seen: list[Attempt] = []
        for attempt in attempts:
            conversation = attempt.conversation
            assert conversation is not None
            given = conversation.reward(self._config.reward)
            self._given[attempt.id] = 0.0 if given is None and self._alone else given
            if not (self._alone or conversation.failed):
                seen.append(attempt)
        return seen

    def forget(self, attempt: AttemptId) -> None:
        """Its grade is not wanted."""
        self._given.pop(attempt, None)

    def add(self, grade: Grade) -> Grade:
        """A grade with the environment's reward in it."""
        given = self._given.pop(grade.attempt, None)
        if self._config is None or given is None or grade.error is not None:
            return grade
        scores: Mapping[str, float | None] = {**grade.rewards, NAME: given}
        total = (grade.reward or 0.0) + self._config.weight * given
        return replace(grade, reward=total, rewards=scores)

    def alone(self, attempts: Iterable[Attempt]) -> list[Grade]:
        """Grades of responses that no reward function sees."""
        return [self.add(Grade(attempt=a.id, reward=None, rewards={})) for a in attempts]
