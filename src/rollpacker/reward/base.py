"""What a reward function is given and what the graders return."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollpacker.core.types import AttemptId


class GradingError(RuntimeError):
    """A response could not be graded; no score is invented for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradeRequest:
    """One response to grade.

    Args:
        attempt: what is graded.
        prompt: the prompt as the user gave it: text or chat messages.
        completion: the decoded response, special tokens removed.
        completion_ids: its token ids.
        row: the columns of the data row (``answer`` and any others).
    """

    attempt: AttemptId
    prompt: str | list[dict[str, str]]
    completion: str
    completion_ids: list[int]
    row: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grade:
    """The outcome for one response.

    Args:
        attempt: what was graded.
        reward: weighted sum; None when grading failed.
        rewards: each function's score by name (those that were not applicable left out).
        error: why there is no reward.
        seconds: time that the functions took.
    """

    attempt: AttemptId
    reward: float | None
    rewards: Mapping[str, float]
    error: str | None = None
    seconds: float = 0.0
