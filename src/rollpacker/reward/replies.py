"""What a grading process wrote, checked: a process that ran hostile text is not trusted."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

from rollpacker.reward.process import Job
from rollpacker.reward.wire import WireError


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One message.

    Args:
        ready: the process has loaded its functions.
        fatal: why it cannot load them.
        scores: of the running job's next function, one for each request.
        error: why that function has no scores.
        seconds: time that the call took.
    """

    ready: bool = False
    fatal: str | None = None
    scores: tuple[float | None, ...] = ()
    error: str | None = None
    seconds: float = 0.0


def read_reply(payload: bytes, job: Job | None) -> Reply:
    """Decode a message of a process that runs ``job``.

    Raises ``WireError`` when it is not an answer to the job's next call.
    """
    try:
        data = json.loads(payload)
    except (ValueError, RecursionError):
        raise WireError("no JSON") from None
    if not isinstance(data, dict):
        raise WireError("no object")
    if isinstance(fatal := data.get("fatal"), str):
        return Reply(fatal=fatal[:1000])
    if data.get("ready") is True:
        return Reply(ready=True)
    if job is None or data.get("job") != job.id or not _seconds(data.get("s")):
        raise WireError("no answer to the running job")
    if isinstance(error := data.get("error"), str):
        return Reply(error=error[:1000], seconds=data["s"])
    scores = data.get("scores")
    if data.get("f") != job.functions[0] or not isinstance(scores, list):
        raise WireError("no scores of the running call")
    if len(scores) != len(job.requests) or not all(s is None or _finite(s) for s in scores):
        raise WireError("no scores of the running call")
    return Reply(scores=tuple(scores), seconds=data["s"])


def _finite(value: Any) -> bool:
    return isinstance(value, float) and math.isfinite(value)


def _seconds(value: Any) -> bool:
    return _finite(value) and value >= 0
