"""What a grading process wrote, checked: a process that ran hostile text is not trusted."""

from __future__ import annotations

import json
import math
from collections.abc import Sized
from typing import Annotated

import msgspec
from msgspec.structs import replace

from rollpacker.processes.frames import WireError
from rollpacker.reward.base import CodeRun
from rollpacker.reward.processes.process import GradingJob

_LONGEST = 1000
"""Characters of a text that are shown."""


class GraderReply(msgspec.Struct, frozen=True, kw_only=True):
    """One message.

    Args:
        ready: the process has loaded its functions.
        fatal: why it cannot load them.
        job: what is answered, and
        function: which of its functions.
        scores: of the running job's next function, one for each request.
        error: why that function has no scores.
        way: what faults of that kind have in common.
        seconds: time that the call took; infinite where it does not say.
        runs: what became of each response's program, where the function runs them.
        extra: columns that the function logged, for each response.
        metrics: numbers that it logged, for each response.
        beat: the running call goes on: its job.
        say: something that the user should know.
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
    """Decode a message of a process that runs ``job``.

    Raises ``WireError`` when it is not an answer to the job's next call.
    """
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
        # It refuses half a surrogate pair, which a user's function may have logged.
        data = json.loads(payload, parse_float=_finite, parse_constant=_finite)
        return msgspec.convert(data, GraderReply)


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text} is no finite number")
    return number


def _check(reply: GraderReply, job: GradingJob) -> None:
    """Refuse scores of another call, and what does not belong to its requests one by one."""

    def each(values: Sized) -> bool:
        return len(values) == len(job.requests)

    if reply.function != job.functions[0] or not each(reply.scores):
        raise WireError("no scores of the running call")
    if not all(each(values) for values in (reply.runs, reply.extra, reply.metrics) if values):
        raise WireError("no notes of the running call")
    for run in reply.runs:
        if len(run.tests) != len(run.cpu_s) or min((*run.cpu_s, run.timeout_s)) < 0:
            raise WireError("no program's outcome")
