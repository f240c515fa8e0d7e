"""What every route answers and refuses, for the description of the API."""

from __future__ import annotations

from typing import Any

from fastapi.responses import PlainTextResponse, StreamingResponse
from pydantic import BaseModel, ConfigDict

from rollpacker.rollmux.service.api import answers, bodies

Docs = dict[str, Any]
_COMMON = (
    "400: a field; 401: the token; 403 `forbidden`: the token's role or team does not allow it; "
    "408: the body came too slowly; 413: the body is too large; "
    "422: the Idempotency-Key was used for another request before; 431: the headers are too large; "
    "500 `poisoned`: the scheduler failed on it and nothing was changed; 503 `unavailable`: "
    "nothing is known about the outcome, send the same request with the same key again"
)


class Error(BaseModel):
    """What is wrong; some errors tell more beside."""

    model_config = ConfigDict(use_attribute_docstrings=True)
    error: str
    """One line: what is wrong, and which field."""
    code: str | None = None
    """The reason for programs, where there are several."""


def _answer(model: Any, text: str) -> Docs:
    return {"description": text} if model is None else {"description": text, "model": model}


def _route(tag: str, model: Any, *, status: int = 200, **refused: str) -> Docs:
    """Of a route; ``refused`` are reasons by status: ``r409="held, over"``."""
    told = {status: _answer(model, "done")}
    told |= {int(name[1:]): _answer(Error, text) for name, text in refused.items()}
    common = {"default": _answer(Error, _COMMON)}
    return {"tags": [tag], "status_code": status, "responses": told | common}


def _or(docs: Docs, status: int, model: Any, text: str) -> Docs:
    """It may also be answered so."""
    first = docs["status_code"]
    told = {first: docs["responses"][first], status: _answer(model, text)}
    return docs | {"responses": told | docs["responses"]}


_NO_JOB, _NO_NODE = "`unknown`: no such job", "`unknown`: no such node"
_NOT_HERE = "`unlisted`: the inventory has no such node; `unknown`: a cloud's that is not in use"
_TAKEN = "`taken`: while another agent of the node is heard"
_NO_PERMIT = "`unknown`: no such permit"
_LOST = "`lost`: stop at once"

SUBMIT = _route(
    "jobs",
    answers.Submitted,
    status=201,
    r409="`exists`: the id is taken for ever; `draining`: no new jobs; `too_large`: all nodes "
    "together are too few",
)
JOBS = _route("jobs", answers.Jobs)
JOB = _route("jobs", answers.JobView, r404=_NO_JOB)
PERMITS = _or(
    _route(
        "jobs",
        answers.PermitView | answers.Moving,
        r404=_NO_JOB,
        r409="`held`: another process of this job has a live permit (`token`): ask again after "
        "`ttl_s`; `superseded`: a newer request took this one's place, you are the old process: "
        "stop; `over`: the permit of this key is finished or lost, ask with a new key; `order`: "
        "the wrong phase, see `next`; `complete`: all iterations are done; `ended`: the job is "
        "ending or ended",
    ),
    204,
    None,
    "not yet: send the same request with the same key again",
)
TAIL = _route("jobs", answers.TailTold, r404=_NO_JOB, r409=_LOST)
MOVED = _route("jobs", answers.Nothing, r404=_NO_JOB, r409="another move is current: `move`")
_ENDED = _route("jobs", answers.EndedAnswer, r404=_NO_JOB)
END = _or(_ENDED, 202, answers.EndedAnswer, "while a permit is out")

_NO_ATTEMPT = "`unknown`: no such job; `no_attempt`: no such start of its program"
PRINTED = _route("jobs", answers.PrintedAnswer, r404=_NO_ATTEMPT)
LOG = _route("jobs", answers.Log, r404=_NO_ATTEMPT)
_NO_RUN = "`unknown`: no such job; `no_attempt`: agents run nothing of it"
GATE_OPENED = _route("jobs", answers.Nothing, r404=_NO_RUN)
GATE = _route("jobs", bodies.GateBody, r404=f"{_NO_RUN}; `no_gate`: not yet")

HEARTBEAT = _route("permits", answers.BeatAnswer, r404=_NO_PERMIT, r409=_LOST)
FINISH = _route("permits", answers.DoneAnswer, r404=_NO_PERMIT, r409=_LOST)
ABANDON = _route("permits", answers.GivenBack, r404=_NO_PERMIT, r409=_LOST)

NODE = _route("nodes", answers.NodeView)
REGISTER = _route("nodes", answers.Registered, r409=f"`cloud`: nodes are not named here; {_TAKEN}")
CLOSE = _route("nodes", answers.NodeChanged, r404=_NO_NODE)
OPEN = _route("nodes", answers.NodeChanged, r404=_NO_NODE, r409="`failed`: its agent has to report")
REMOVE = _route("nodes", answers.NodeRemovedAnswer, r404=_NO_NODE, r409="`used`: jobs are on it")
NODE_BEAT = _route(
    "nodes",
    answers.AliveAnswer,
    r404=_NOT_HERE,
    r409=_TAKEN,
    r410="`failed`: stop its processes; a cloud's name is never used again, a named node may "
    "register again",
)
FAILED = _or(
    _route("nodes", answers.NodeGone, r404=_NOT_HERE),
    202,
    answers.NodeGone,
    "while permits on it are out",
)
DRAIN = _route("cluster", answers.Drained)

HEALTH = _or(_route("cluster", answers.Health), 503, answers.Health, "the store cannot be written")
STATUS = _route("cluster", answers.Status)
TIMELINE = _route("cluster", answers.Timeline)
METRICS: Docs = _route("cluster", None) | {"response_class": PlainTextResponse}
LINES: Docs = _route("cluster", None) | {"response_class": StreamingResponse}
