"""The reward that an environment gave, beside those of the reward functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from rollpacker.config import EnvironmentConfig
from rollpacker.core.types import AttemptId
from rollpacker.policy.grading import RESPONSES
from rollpacker.reward.base import Grade
from rollpacker.runtime.attempts.attempts import Trajectory
from rollpacker.runtime.attempts.episode_record import EpisodeRecord

NAME = "environment"
"""Of the reward in metrics and samples."""


class EnvironmentReward:
    """Adds it to the grades of the responses that have one.

    Args:
        config: of the environment; None where there is none.
        names: of the reward functions. Where there are none, an episode that was given nothing has
            a reward of 0.

    Raises ``ValueError`` where one has the environment's name.
    """

    def __init__(self, config: EnvironmentConfig | None, names: Sequence[str]) -> None:
        if config is not None and NAME in names:
            raise ValueError(
                f"rewards: one is named '{NAME}', as what the environment gives is: set "
                f"rewards.{names.index(NAME)}.name"
            )
        self._config = config
        self._alone = not names
        self._given: dict[AttemptId, float | None] = {}
        self._silent: int | None = 0
        """Episodes that ended by themselves and were given nothing; None once that is settled."""

    def note(self, attempts: Iterable[Trajectory]) -> list[Trajectory]:
        """Responses are about to be graded; those that reward functions are to see."""
        if self._config is None:
            return list(attempts)
        seen: list[Trajectory] = []
        for attempt in attempts:
            conversation = attempt.conversation
            assert conversation is not None
            given = conversation.reward(self._config.reward)
            self._given[attempt.id] = 0.0 if given is None and self._alone else given
            self._count(given, conversation)
            if not (self._alone or conversation.failed):
                seen.append(attempt)
        return seen

    def _count(self, given: float | None, conversation: EpisodeRecord) -> None:
        if self._silent is None or conversation.failed:
            return
        if given is not None:
            self._silent = None
        elif self._alone and conversation.over == "stop":
            self._silent += 1

    def said(self) -> list[str]:
        """What the user should know and was not told yet."""
        silent = self._silent
        if silent is None or silent < RESPONSES:
            return []
        self._silent = None
        return [
            f"WARNING environment: {silent} episodes ended and none was given a reward, which "
            "counts as 0, and there are no rewards beside: let the environment give one"
        ]

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

    def alone(self, attempts: Iterable[Trajectory]) -> list[Grade]:
        """Grades of responses that no reward function sees."""
        return [self.add(Grade(attempt=a.id, reward=None, rewards={})) for a in attempts]
