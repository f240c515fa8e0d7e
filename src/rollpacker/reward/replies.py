"""What a grading process wrote, checked: a process that ran hostile text is not trusted."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from rollpacker.reward.base import CodeRun
from rollpacker.reward.process import Job
from rollpacker.reward.wire import WireError

_RUN_FIELDS = {each.name for each in fields(CodeRun)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One message.

    Args:
        ready: the process has loaded its functions.
        fatal: why it cannot load them.
        scores: of the running job's next function, one for each request.
        error: why that function has no scores.
        way: what faults of that kind have in common.
        seconds: time that the call took.
        runs: what became of each response's program, where the function runs them.
        extra: columns that the function logged, for each response.
        metrics: numbers that it logged, for each response.
        beat: the running call goes on.
        say: something that the user should know.
    """

    ready: bool = False
    fatal: str | None = None
    scores: tuple[float | None, ...] = ()
    error: str | None = None
    way: str = ""
    seconds: float = 0.0
    runs: tuple[CodeRun, ...] = ()
    extra: tuple[dict[str, str], ...] = ()
    metrics: tuple[dict[str, float], ...] = ()
    beat: bool = False
    say: str | None = None


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
    return _aside(data, job) or _answer(data, job)


def _aside(data: dict[str, Any], job: Job | None) -> Reply | None:
    """A message that answers no call."""
    if isinstance(fatal := data.get("fatal"), str):
        return Reply(fatal=fatal[:1000])
    if data.get("ready") is True:
        return Reply(ready=True)
    if isinstance(say := data.get("say"), str):
        return Reply(say=say[:1000])
    if "beat" in data:
        return Reply(beat=job is not None and data["beat"] == job.id)
    return None


def _answer(data: dict[str, Any], job: Job | None) -> Reply:
    if job is None or data.get("job") != job.id or not _seconds(data.get("s")):
        raise WireError("no answer to the running job")
    if isinstance(error := data.get("error"), str):
        return Reply(error=error[:1000], way=str(data.get("way"))[:1000], seconds=data["s"])
    scores = data.get("scores")
    if data.get("f") != job.functions[0] or not isinstance(scores, list):
        raise WireError("no scores of the running call")
    if len(scores) != len(job.requests) or not all(s is None or _finite(s) for s in scores):
        raise WireError("no scores of the running call")
    return Reply(
        scores=tuple(scores),
        seconds=data["s"],
        runs=_runs(data.get("runs"), job),
        extra=_logged(data.get("extra"), job, lambda value: isinstance(value, str)),
        metrics=_logged(data.get("metrics"), job, _finite),
    )


def _logged(value: Any, job: Job, fine: Callable[[Any], bool]) -> tuple[dict[str, Any], ...]:
    """What was logged with each response of a call."""
    if value is None:
        return ()
    if not isinstance(value, list) or len(value) != len(job.requests):
        raise WireError("no notes of the running call")
    if not all(isinstance(each, dict) and all(map(fine, each.values())) for each in value):
        raise WireError("no notes of the running call")
    return tuple(value)


def _runs(value: Any, job: Job) -> tuple[CodeRun, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or len(value) != len(job.requests):
        raise WireError("no programs of the running call")
    return tuple(_run(each) for each in value)


def _run(value: Any) -> CodeRun:
    fine = (
        isinstance(value, dict)
        and set(value) == _RUN_FIELDS
        and all(isinstance(value[name], str) for name in ("verdict", "level"))
        and all(isinstance(value[name], list) for name in ("tests", "cpu_s"))
        and all(isinstance(each, str) for each in value["tests"])
        and all(_seconds(each) for each in (*value["cpu_s"], value["timeout_s"]))
        and len(value["tests"]) == len(value["cpu_s"])
        and isinstance(value["forgeable"], bool)
    )
    if not fine:
        raise WireError("no program's outcome")
    return CodeRun(
        verdict=value["verdict"],
        tests=tuple(value["tests"]),
        cpu_s=tuple(value["cpu_s"]),
        timeout_s=value["timeout_s"],
        level=value["level"],
        forgeable=value["forgeable"],
    )


def _finite(value: Any) -> bool:
    return isinstance(value, float) and math.isfinite(value)


def _seconds(value: Any) -> bool:
    return _finite(value) and value >= 0
