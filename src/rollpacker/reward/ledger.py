"""Which responses wait for which calls, and the grades that come of it."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from rollpacker.config import RewardConfig
from rollpacker.core.types import AttemptId
from rollpacker.reward.base import CodeRun, Grade
from rollpacker.reward.functions import reward_names
from rollpacker.reward.process import Job
from rollpacker.reward.replies import Reply


@dataclass(slots=True, eq=False)
class _Held:
    """A response whose grade is not known yet; ``missing`` counts the calls that it waits for."""

    since: float
    missing: int
    scores: dict[int, float] = field(default_factory=dict[int, float])
    runs: dict[int, CodeRun] = field(default_factory=dict[int, CodeRun])
    seconds: float = 0.0


class Ledger:
    """Puts the scores of several functions together.

    Args:
        rewards: the functions and their weights.

    Raises ``ValueError`` when two rewards have one name.
    """

    def __init__(self, rewards: Sequence[RewardConfig]) -> None:
        self.names = reward_names(rewards)
        self.done: list[Grade] = []
        """Grades that nobody has taken yet."""
        self._weights = [reward.weight for reward in rewards]
        self._held: dict[AttemptId, _Held] = {}

    def __bool__(self) -> bool:
        """Whether any grade is awaited."""
        return bool(self._held)

    def hold(self, attempt: AttemptId, missing: int) -> None:
        """Await ``missing`` calls for an attempt, which must not be held already."""
        assert attempt not in self._held, f"attempt {attempt} is held"
        self._held[attempt] = _Held(since=time.monotonic(), missing=missing)
        if missing == 0:
            self._finish(attempt, self._held[attempt])

    def drop(self, attempt: AttemptId) -> None:
        """No grade comes; unknown attempts are ignored."""
        self._held.pop(attempt, None)

    def clear(self) -> None:
        """Forget everything."""
        self._held.clear()

    def wanted(self, job: Job) -> bool:
        """Whether anyone still waits for what it computes."""
        return any(request.attempt in self._held for request in job.requests)

    def pending(self) -> dict[AttemptId, float]:
        """Seconds since ``hold`` of every attempt whose grade is awaited."""
        now = time.monotonic()
        return {attempt: now - held.since for attempt, held in self._held.items()}

    def score(self, job: Job, function: int, reply: Reply) -> None:
        """One function's scores of a job have come."""
        runs = reply.runs or (None,) * len(reply.scores)
        for request, score, run in zip(job.requests, reply.scores, runs, strict=True):
            held = self._held.get(request.attempt)
            if held is None:
                continue
            held.seconds += reply.seconds
            held.missing -= 1
            if score is not None:
                held.scores[function] = score
            if run is not None:
                held.runs[function] = run
            if held.missing == 0:
                self._finish(request.attempt, held)

    def _finish(self, attempt: AttemptId, held: _Held) -> None:
        del self._held[attempt]
        order = sorted(held.scores)
        total = sum(self._weights[i] * held.scores[i] for i in order)
        error = None
        if not math.isfinite(total):
            error = f"the weighted sum of its rewards is {total}"
        grade = Grade(
            attempt=attempt,
            reward=total if order and error is None else None,
            rewards={self.names[i]: held.scores[i] for i in order},
            error=error,
            seconds=held.seconds,
            runs={self.names[i]: run for i, run in sorted(held.runs.items())},
        )
        self.done.append(grade)

    def fail(self, job: Job, error: str) -> None:
        """The responses of a job get no reward."""
        for request in job.requests:
            held = self._held.pop(request.attempt, None)
            if held is not None:
                grade = Grade(
                    attempt=request.attempt,
                    reward=None,
                    rewards={},
                    error=error,
                    seconds=held.seconds,
                )
                self.done.append(grade)
