"""What a request may carry: its key, and the bodies of the POSTs."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from inspect import cleandoc
from typing import Annotated, Any, Literal

from fastapi import Depends, Header, Query, Request
from pydantic import BaseModel, Field, create_model

from rollpacker.config.base import fields_of
from rollpacker.core.types import Phase
from rollpacker.rollmux.model.inventory import NAME, Machine
from rollpacker.rollmux.model.jobs import JobSpec
from rollpacker.rollmux.model.program import JobProgram
from rollpacker.rollmux.service.api.roles import BY, OPERATOR, Principal

_LARGEST = 2**63 - 1
_AGENT = "its identity: while one is heard, others of the same node are refused"
Count = Annotated[int, Query(ge=0, le=_LARGEST)]
Position = Annotated[int, Query(ge=-_LARGEST, le=_LARGEST)]
Seconds = Annotated[float, Query(ge=0, le=1e12)]
Name = Annotated[str, Query(pattern=f"^({NAME.pattern})?$")]
"""What may stand behind a path's question mark."""
_ARGS = re.compile(r"^Args:\n(.*?)(?:\n\n|\Z)", re.M | re.S)
_FIELD = re.compile(r"^ {4}(\w+): (.*?)(?=^ {4}\w+: |\Z)", re.M | re.S)


def args_of(kind: type[object]) -> dict[str, str]:
    """The ``Args`` section of a class: texts by name, each in one line."""
    section = _ARGS.search(cleandoc(kind.__doc__ or ""))
    found = _FIELD.findall(section[1]) if section else []
    return {name: one_line(text) for name, text in found}


def one_line(text: str) -> str:
    """Without line breaks, in Markdown."""
    return " ".join(text.split()).replace("``", "`")


class Empty(BaseModel, extra="forbid", strict=True):
    """An object without fields."""


def _fields_of(kind: type[Any]) -> Any:
    return fields_of(kind, args_of(kind))


class NewProgram(create_model("NewProgram", __base__=Empty, **_fields_of(JobProgram))):
    """What agents start."""

    command: list[str]  # JSON has no tuples
    members: list[str] = Field(default_factory=list)


class NewJob(create_model("NewJob", __base__=Empty, **_fields_of(JobSpec))):
    """What a job asks for."""

    program: NewProgram | None = Field(default=None, description="what agents start.")


class NewNode(create_model("NewNode", __base__=Empty, **_fields_of(Machine))):
    """A node as its agent describes it."""

    agent: Annotated[str, Field(max_length=64, description=_AGENT)] = ""


class Closed(Empty):
    """How a node is closed."""

    status: Literal["cordoned", "draining"]
    reason: str = Field(default="", max_length=200, description="for people")


class Ask(Empty):
    """Of a permit."""

    phase: Phase
    wait_s: float = Field(20.0, ge=0, le=60, description="seconds that the request may wait")


class FinishedBody(Empty):
    """A phase that is over."""

    seconds: float = Field(ge=1e-6, lt=1e9, description="what it took on its nodes")


class TailBody(Empty):
    """Of the rollout with this permit."""

    token: int


class MovedBody(Empty):
    """The number of the move that is done."""

    move: int


class GateBody(Empty):
    """Where the driver of an attempt is to be found."""

    host: str = Field(max_length=255)
    port: int = Field(ge=1, le=65535)
    key: str = Field(
        pattern="^[0-9a-f]{160}$",
        description="what both sides show they know, sealed with their token, as hex digits",
    )
    names: list[str] = Field(max_length=1024, description="of each process, by its node's rank")


class SeenAttempt(Empty):
    """An attempt that is on a node."""

    job: str
    number: int
    code: int | None = Field(default=None, description="null while it runs")
    stopped: bool = Field(False, description="asked to end")


class AliveBody(Empty):
    """A node lives."""

    attempts: list[SeenAttempt] | None = Field(
        default=None, description="what its agent has started, null where it starts nothing"
    )
    agent: Annotated[str, Field(max_length=64, description=_AGENT)] = ""


class PrintedBody(Empty):
    """What an attempt printed."""

    at: int = Field(ge=0, description="the byte at which it begins")
    data: str = Field(max_length=48 * 1024, description="in base64")


class FailedBody(Empty):
    """A node that is gone."""

    reason: str = Field(default="", description="for people")


class Drain(Empty):
    """Turn new jobs away, or no longer."""

    draining: bool = True


@dataclass(frozen=True, slots=True)
class Post:
    """A POST: its idempotency key, a fingerprint of what it asks, and who asks.

    Args:
        job, token: what it is about, where its route says that somebody owns that.
    """

    key: str
    fingerprint: str
    by: Principal = OPERATOR
    job: str | None = None
    token: int | None = None

    def known(self) -> dict[str, Any]:
        """What is recorded of it."""
        return {"key": self.key, "request": self.fingerprint}


async def _asked(
    request: Request,
    key: Annotated[str, Header(alias="Idempotency-Key", pattern=r"^[A-Za-z0-9._:-]{1,128}$")],
) -> Post:
    line = f"{request.method} {request.url.path}"
    found = asked(key, line, await request.json())
    owner = request.scope["route"].access.owner
    about = {name: value for name, value in request.path_params.items() if name == owner}
    return replace(found, by=request.scope[BY], **about)


Key = Annotated[Post, Depends(_asked)]


def asked(key: str, line: str, body: object) -> Post:
    """A POST of ``body``; how long it may wait for its answer is not what it asks."""
    if isinstance(body, dict):
        body = {name: value for name, value in body.items() if name != "wait_s"}
    text = f"{line} {json.dumps(body, sort_keys=True)}"
    return Post(key, blake2b(text.encode(), digest_size=16).hexdigest())


def problem(errors: Sequence[Any]) -> str:
    """What is wrong with a request, in one line, by what pydantic found."""
    first = errors[0]
    where = first["loc"][-1] if first["loc"] else "body"
    match first["type"]:
        case "extra_forbidden":
            return f"{where[:64]!a}: unknown field"
        case _:
            return f"{where}: {first['msg']}"
