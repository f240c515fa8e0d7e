"""The calls that each response waits for, and its grade once they are done."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import Annotated

import msgspec
from msgspec.structs import replace

from rollpacker.config import RewardConfig
from rollpacker.core.types import AttemptId
from rollpacker.processes.frames import WireError
from rollpacker.reward.base import CodeRun, Grade
from rollpacker.reward.functions import reward_names
from rollpacker.reward.processes.process import GradingJob

# A grading process's replies are checked: a process that ran hostile text is not trusted.

_LONGEST = 1000  # characters of a text that are shown


class GraderReply(msgspec.Struct, frozen=True, kw_only=True):
    """One message of a grading process.

    Args:
        fatal: why the functions cannot be loaded.
        scores: of the running job's next function, one for each request.
        way: the kind of the fault.
        seconds: time of the call, infinite if it is missing.
        beat: the job of a call that still runs.
        say: a line for the user.
    """

    ready: bool = False
    fatal: str | None = None
    job: int | None = None
    function: int | None = msgspec.field(name="f", default=None)
    scores: tuple[float | None, ...] = ()
    error: str | None = None
    way: str = ""
    seconds: Annotated[float, msgspec.Meta(ge=0)] = msgspec.field(name="s", default=math.inf)
    runs: tuple[CodeRun, ...] = ()
    extra: tuple[dict[str, str], ...] = ()
    metrics: tuple[dict[str, float], ...] = ()
    beat: int | None = None
    say: str | None = None


_decode = msgspec.json.Decoder(GraderReply).decode


def read_reply(payload: bytes, job: GradingJob | None) -> GraderReply:
    """Decode a message of a process that runs ``job``. Raises ``WireError`` if it does not answer
    the job's next call."""
    try:
        reply = _parsed(payload)
    except (ValueError, RecursionError) as error:
        raise WireError(f"no reply: {error}") from None
    if reply.fatal is not None:
        return replace(reply, fatal=reply.fatal[:_LONGEST])
    if reply.say is not None:
        return replace(reply, say=reply.say[:_LONGEST])
    if reply.ready:
        return reply
    if reply.beat is not None:
        return reply if job is not None and reply.beat == job.id else GraderReply()
    if job is None or reply.job != job.id or not math.isfinite(reply.seconds):
        raise WireError("no answer to the running job")
    if reply.error is not None:
        return replace(reply, error=reply.error[:_LONGEST], way=reply.way[:_LONGEST])
    _check(reply, job)
    return reply


def _parsed(payload: bytes) -> GraderReply:
    try:
        return _decode(payload)
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError:
        # msgspec refuses half a surrogate pair, and a user's function may log one.
        data = json.loads(payload, parse_float=_finite, parse_constant=_finite)
        return msgspec.convert(data, GraderReply)


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text} is no finite number")
    return number


def _check(reply: GraderReply, job: GradingJob) -> None:
    def each(values: Sized) -> bool:
        return len(values) == len(job.requests)

    if reply.function != job.functions[0] or not each(reply.scores):
        raise WireError("no scores of the running call")
    if not all(each(values) for values in (reply.runs, reply.extra, reply.metrics) if values):
        raise WireError("no notes of the running call")
    for run in reply.runs:
        if len(run.tests) != len(run.cpu_s) or min((*run.cpu_s, run.timeout_s)) < 0:
            raise WireError("no program's outcome")


@dataclass(slots=True, eq=False)
class _Held:
    since: float
    missing: int
    scores: dict[int, float] = field(default_factory=dict[int, float])
    runs: dict[int, CodeRun] = field(default_factory=dict[int, CodeRun])
    extra: dict[str, str] = field(default_factory=dict[str, str])
    metrics: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    seconds: float = 0.0


class ScoreLedger:
    """Combines the scores of several functions into grades. Raises ``ValueError`` if two rewards
    have one name."""

    def __init__(self, rewards: Sequence[RewardConfig]) -> None:
        self.names = reward_names(rewards)
        self.done: list[Grade] = []  # grades not taken yet
        self._weights = [reward.weight for reward in rewards]
        self._held: dict[AttemptId, _Held] = {}

    def __bool__(self) -> bool:
        return bool(self._held)

    def hold(self, attempt: AttemptId, missing: int) -> None:
        """Await ``missing`` calls for an attempt that is not held yet."""
        assert attempt not in self._held, f"attempt {attempt} is held"
        self._held[attempt] = _Held(since=time.monotonic(), missing=missing)
        if missing == 0:
            self._finish(attempt, self._held[attempt])

    def drop(self, attempt: AttemptId) -> None:
        """Stop awaiting an attempt's grade. Unknown attempts are ignored."""
        self._held.pop(attempt, None)

    def clear(self) -> None:
        self._held.clear()

    def wanted(self, job: GradingJob) -> bool:
        return any(request.attempt in self._held for request in job.requests)

    def pending(self) -> dict[AttemptId, float]:
        now = time.monotonic()
        return {attempt: now - held.since for attempt, held in self._held.items()}

    def score(self, job: GradingJob, function: int, reply: GraderReply) -> None:
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
        """The function is not applicable to the job."""
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
        """Give the responses of a job no reward."""
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
