"""What a request may carry: its key, what stands behind its path's question mark, its body."""

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
    says("its identity: while one is heard, others of the same node are refused", max_length=64),
]


class Empty(Struct, frozen=True):
    """An object without fields."""


class NewJob(JobSpec, frozen=True, kw_only=True):
    """What a job asks for."""

    id: Annotated[_Name, says("unique.")]
    program: Annotated[JobProgram | None, says("what agents start.")] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NewNode(Machine):
    """A node as its agent describes it."""

    name: _Name
    agent: _Agent = ""


class Closed(Struct, frozen=True):
    """How a node is closed."""

    status: Literal["cordoned", "draining"]
    reason: Annotated[str, says("for people", max_length=200)] = ""


class Change(Struct, frozen=True):
    """How a job is to be treated; null leaves it as it is."""

    held: Annotated[
        bool | None,
        says("it gives its nodes back when its iteration is over, and gets none."),
    ] = None
    priority: Annotated[int | None, says("the higher ones of a team go first.")] = None


class Ask(Struct, frozen=True):
    """Of a permit."""

    phase: Phase
    wait_s: Annotated[float, says("seconds that the request may wait", ge=0, le=60)] = 20.0


class OfJob(Struct, frozen=True, kw_only=True):
    """Whose permit it is."""

    job: Annotated[_OptionalName, says("the sender's; refused where the permit is another's")] = ""


class FinishedBody(OfJob, frozen=True, kw_only=True):
    """A phase that is over."""

    seconds: Annotated[float, says("what it took on its nodes", ge=1e-6, lt=1e9)]


class TailBody(Struct, frozen=True):
    """Of the rollout with this permit."""

    token: int


class MovedBody(Struct, frozen=True):
    """The number of the move that is done."""

    move: int


class GateBody(Struct, frozen=True):
    """Where the driver of an attempt is to be found."""

    host: Annotated[str, Meta(max_length=255)]
    port: Annotated[int, Meta(ge=1, le=65535)]
    key: Annotated[
        str, says("what both know, sealed with their token, in hex", pattern="^[0-9a-f]{160}$")
    ]
    names: Annotated[list[str], says("of each process, by its node's rank", max_length=1024)]


class SeenAttempt(Struct, frozen=True):
    """An attempt that is on a node."""

    job: str
    number: int
    code: Annotated[int | None, says("null while it runs")] = None
    stopped: Annotated[bool, says("asked to end")] = False


class AliveBody(Struct, frozen=True):
    """A node lives."""

    attempts: Annotated[list[SeenAttempt] | None, says("null where it starts nothing")] = None
    agent: _Agent = ""


class PrintedBody(Struct, frozen=True):
    """What an attempt printed."""

    at: Annotated[int, says("the byte at which it begins", ge=0)]
    data: Annotated[str, says("in base64", max_length=48 * 1024)]


class FailedBody(Struct, frozen=True):
    """A node that is gone."""

    reason: Annotated[str, says("for people")] = ""


class Drain(Struct, frozen=True):
    """Turn new jobs away, or no longer."""

    draining: bool = True


class NewToken(Struct, frozen=True):
    """Whose token is made."""

    name: str
    role: Role
    team: Annotated[str, says("of `submit`: whose jobs it may touch; empty for everybody's")] = ""


class RevokedToken(Struct, frozen=True):
    """Whose token counts no more."""

    name: str


class Window(Struct, frozen=True):
    """Which phases."""

    window_s: Annotated[float, Meta(ge=0, le=1e12)] = 600.0
    job: _OptionalName = ""
    node: _OptionalName = ""


class After(Struct, frozen=True):
    """Which entries."""

    after: Annotated[int, Meta(ge=0, le=_LARGEST)] = 0


class OfAttempt(Struct, frozen=True):
    """Of one start of a program."""

    attempt: int


class Piece(Struct, frozen=True):
    """Which piece of a log."""

    attempt: Annotated[int, Meta(ge=0, le=_LARGEST)] | None = None
    at: Annotated[int, Meta(ge=-_LARGEST, le=_LARGEST)] = 0


@dataclass(frozen=True, slots=True)
class Post:
    """A POST: its idempotency key, a fingerprint of what it asks, and who asks.

    Args:
        job, token: what it is about, where its route says that somebody owns that.
        of: the job that the body names, the sender's.
    """

    key: str
    fingerprint: str
    by: Principal = OPERATOR
    job: str | None = None
    token: int | None = None
    of: str = ""

    def known(self) -> dict[str, Any]:
        """What is recorded of it."""
        return {"key": self.key, "request": self.fingerprint}


def asked(key: str, line: str, body: object, **more: Any) -> Post:
    """A POST of ``body``; how long it may wait for its answer is not what it asks."""
    of = body.get("job", "") if isinstance(body, dict) else ""
    if isinstance(body, dict):
        body = {name: value for name, value in body.items() if name != "wait_s"}
    text = f"{line} {json.dumps(body, sort_keys=True)}"
    return Post(key, blake2b(text.encode(), digest_size=16).hexdigest(), of=of, **more)
