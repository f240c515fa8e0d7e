"""The parts of requests: idempotency keys, queries and bodies."""

from __future__ import annotations

import json
from dataclasses import dataclass
from hashlib import blake2b
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from rollpacker.core.codec import says
from rollpacker.core.types import Phase
from rollpacker.rollmux.model.inventory import NAME, Machine
from rollpacker.rollmux.model.jobs import JobSpec
from rollpacker.rollmux.model.program import JobProgram
from rollpacker.rollmux.service.api.roles import OPERATOR, Principal, Role

_LARGEST = 2**63 - 1
_Name = Annotated[str, Meta(pattern=f"^{NAME.pattern}$")]
_OptionalName = Annotated[str, Meta(pattern=f"^({NAME.pattern})?$")]
_Agent = Annotated[
    str,
    says(
        "identity of the agent. While one reports, others of the same node are refused.",
        max_length=64,
    ),
]


class Empty(Struct, frozen=True):
    """An object without fields."""


class NewJob(JobSpec, frozen=True, kw_only=True):
    """A job's request."""

    id: Annotated[_Name, says("unique.")]
    program: Annotated[JobProgram | None, says("the program that agents start.")] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NewNode(Machine):
    """A node as described by its agent."""

    name: _Name
    agent: _Agent = ""


class Closed(Struct, frozen=True):
    """A way to close a node."""

    status: Literal["cordoned", "draining"]
    reason: Annotated[str, says("for users", max_length=200)] = ""


class Change(Struct, frozen=True):
    """Changes of a job. Null keeps a value."""

    held: Annotated[
        bool | None,
        says("gives its nodes back after its iteration, and gets none."),
    ] = None
    priority: Annotated[int | None, says("jobs of a team with a higher one go first.")] = None


class Ask(Struct, frozen=True):
    """A request for a permit."""

    phase: Phase
    wait_s: Annotated[float, says("seconds that the request may wait", ge=0, le=60)] = 20.0


class OfJob(Struct, frozen=True, kw_only=True):
    """The job of a permit."""

    job: Annotated[_OptionalName, says("the sender's. Refused if another job has the permit.")] = ""


class FinishedBody(OfJob, frozen=True, kw_only=True):
    """A finished phase."""

    seconds: Annotated[float, says("time on its nodes", ge=1e-6, lt=1e9)]


class TailBody(Struct, frozen=True):
    """The permit of a running rollout."""

    token: int


class MovedBody(Struct, frozen=True):
    """The number of a finished move."""

    move: int


class GateBody(Struct, frozen=True):
    """The address of an attempt's driver."""

    host: Annotated[str, Meta(max_length=255)]
    port: Annotated[int, Meta(ge=1, le=65535)]
    key: Annotated[
        str, says("shared key, sealed with the token, in hex", pattern="^[0-9a-f]{160}$")
    ]
    names: Annotated[list[str], says("name of each process, by its node's rank", max_length=1024)]


class SeenAttempt(Struct, frozen=True):
    """An attempt on a node."""

    job: str
    number: int
    code: Annotated[int | None, says("null while it runs")] = None
    stopped: Annotated[bool, says("whether it was asked to end")] = False


class AliveBody(Struct, frozen=True):
    """A report of a node."""

    attempts: Annotated[list[SeenAttempt] | None, says("null if the agent starts no programs")] = (
        None
    )
    agent: _Agent = ""


class PrintedBody(Struct, frozen=True):
    """A piece of an attempt's output."""

    at: Annotated[int, says("first byte", ge=0)]
    data: Annotated[str, says("in base64", max_length=48 * 1024)]


class FailedBody(Struct, frozen=True):
    """A failed node."""

    reason: Annotated[str, says("for users")] = ""


class Drain(Struct, frozen=True):
    """Refuse new jobs, or accept them again."""

    draining: bool = True


class NewToken(Struct, frozen=True):
    """A new token."""

    name: str
    role: Role
    team: Annotated[str, says("for `submit`: team whose jobs it may change, empty for all")] = ""


class RevokedToken(Struct, frozen=True):
    """A revoked token."""

    name: str


class Window(Struct, frozen=True):
    """Selects phases."""

    window_s: Annotated[float, Meta(ge=0, le=1e12)] = 600.0
    job: _OptionalName = ""
    node: _OptionalName = ""


class After(Struct, frozen=True):
    """Selects entries."""

    after: Annotated[int, Meta(ge=0, le=_LARGEST)] = 0


class OfAttempt(Struct, frozen=True):
    """Selects an attempt."""

    attempt: int


class Piece(Struct, frozen=True):
    """Selects a piece of a log."""

    attempt: Annotated[int, Meta(ge=0, le=_LARGEST)] | None = None
    at: Annotated[int, Meta(ge=-_LARGEST, le=_LARGEST)] = 0


@dataclass(frozen=True, slots=True)
class Post:
    """A POST: its idempotency key, a fingerprint of its content, and its sender.

    Args:
        job, token: subject of a route that checks the owner.
        of: the job that the body names as its sender.
    """

    key: str
    fingerprint: str
    by: Principal = OPERATOR
    job: str | None = None
    token: int | None = None
    of: str = ""

    def known(self) -> dict[str, Any]:
        return {"key": self.key, "request": self.fingerprint}


def asked(key: str, line: str, body: object, **more: Any) -> Post:
    """A POST of ``body``. Its fingerprint leaves out ``wait_s``."""
    of = body.get("job", "") if isinstance(body, dict) else ""
    if isinstance(body, dict):
        body = {name: value for name, value in body.items() if name != "wait_s"}
    text = f"{line} {json.dumps(body, sort_keys=True)}"
    return Post(key, blake2b(text.encode(), digest_size=16).hexdigest(), of=of, **more)
