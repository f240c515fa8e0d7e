"""Which responses wait for which calls, and the grades that come of it."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rollpacker.config import RewardConfig
from rollpacker.core.types import AttemptId
from rollpacker.reward.base import CodeRun, Grade
from rollpacker.reward.functions import reward_names
from rollpacker.reward.processes.process import GradingJob
from rollpacker.reward.processes.replies import GraderReply


@dataclass(slots=True, eq=False)
class _Held:
    """A response whose grade is not known yet; ``missing`` counts the calls that it waits for."""

    since: float
    missing: int
    scores: dict[int, float] = field(default_factory=dict[int, float])
    runs: dict[int, CodeRun] = field(default_factory=dict[int, CodeRun])
    extra: dict[str, str] = field(default_factory=dict[str, str])
    metrics: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    seconds: float = 0.0


class ScoreLedger:
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

    def wanted(self, job: GradingJob) -> bool:
        """Whether anyone still waits for what it computes."""
        return any(request.attempt in self._held for request in job.requests)

    def pending(self) -> dict[AttemptId, float]:
        """Seconds since ``hold`` of every attempt whose grade is awaited."""
        now = time.monotonic()
        return {attempt: now - held.since for attempt, held in self._held.items()}

    def score(self, job: GradingJob, function: int, reply: GraderReply) -> None:
        """One function's scores of a job have come."""
        for place, request in enumerate(job.requests):
            held = self._held.get(request.attempt)
            if held is None:
                continue
            held.seconds += reply.seconds / len(job.requests)
            score = reply.scores[place]
            if score is not None:
                held.scores[function] = score
            if reply.runs:
                held.runs[function] = reply.runs[place]
            if reply.extra:
                held.extra |= reply.extra[place]
            if reply.metrics:
                for name, value in reply.metrics[place].items():
                    held.metrics.setdefault(name, []).append(value)
            self._count(request.attempt, held)

    def skip(self, job: GradingJob) -> None:
        """A function is not called for the responses of a job: it is not applicable."""
        for request in job.requests:
            if (held := self._held.get(request.attempt)) is not None:
                self._count(request.attempt, held)

    def _count(self, attempt: AttemptId, held: _Held) -> None:
        held.missing -= 1
        if held.missing == 0:
            self._finish(attempt, held)

    def _finish(self, attempt: AttemptId, held: _Held) -> None:
        del self._held[attempt]
        total = sum(self._weights[i] * held.scores[i] for i in sorted(held.scores))
        error = None
        if not math.isfinite(total):
            error = f"the weighted sum of its rewards is {total}"
        scores = {name: held.scores.get(i) for i, name in enumerate(self.names)}
        reward = total if held.scores and error is None else None
        self.done.append(self._grade(attempt, held, reward, scores, error))

    def fail(self, job: GradingJob, error: str) -> None:
        """The responses of a job get no reward."""
        for request in job.requests:
            held = self._held.pop(request.attempt, None)
            if held is not None:
                scores = {self.names[i]: held.scores[i] for i in sorted(held.scores)}
                self.done.append(self._grade(request.attempt, held, None, scores, error))

    def _grade(
        self,
        attempt: AttemptId,
        held: _Held,
        reward: float | None,
        scores: Mapping[str, float | None],
        error: str | None,
    ) -> Grade:
        return Grade(
            attempt=attempt,
            reward=reward,
            rewards=scores,
            error=error,
            seconds=held.seconds,
            runs={self.names[i]: run for i, run in sorted(held.runs.items())},
            extra=held.extra,
            metrics={name: sum(all_) / len(all_) for name, all_ in held.metrics.items()},
        )
