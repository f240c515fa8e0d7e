"""The daemon's own events, besides the scheduler's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from rollpacker.core.codec import Tagged, dumps, kinds, load_tagged, loads
from rollpacker.rollmux.model import decisions as do
from rollpacker.rollmux.model import events as ev
from rollpacker.rollmux.model.program import JobProgram


class DrainSet(Tagged, frozen=True, kw_only=True):
    """Whether new jobs are refused."""

    draining: bool


class AgentJoined(Tagged, frozen=True, kw_only=True):
    """First report of a node's agent, whose silence counts as a failure from now on."""

    node: str
    agent: str = ""


class NodeFenced(Tagged, frozen=True, kw_only=True):
    """A node failed while its jobs hold permits (``tokens``), which heartbeats do not extend any
    more.

    The scheduler gets the failure after they end. ``why`` is for users.
    """

    node: str
    tokens: tuple[int, ...]
    why: str = ""


class EndFenced(Tagged, frozen=True, kw_only=True):
    """A job must end but holds a permit. The scheduler gets its end after that of the permit."""

    job: str
    token: int


class ProgramGiven(Tagged, frozen=True, kw_only=True):
    """A job has a program that agents start."""

    job: str
    program: JobProgram


class AttemptBegun(Tagged, frozen=True, kw_only=True):
    """A node's agent must start a job's program for the ``number``-th time.

    ``members`` are the job's other nodes with processes of the program.
    """

    job: str
    number: int
    node: str
    members: tuple[str, ...] = ()


class AttemptEnded(Tagged, frozen=True, kw_only=True):
    """An agent has seen a program end, or has ended it because its job moved or left (`told`)."""

    job: str
    code: int
    told: bool


class MemberFailed(Tagged, frozen=True, kw_only=True):
    """A process on a member node has failed, so the attempt ends as failed."""

    job: str
    node: str
    code: int


OfProgram = ProgramGiven | AttemptBegun | AttemptEnded | MemberFailed
Note = DrainSet | AgentJoined | NodeFenced | EndFenced | OfProgram
Recorded = ev.Event | Note  # all content of log entries

_RECORDED = kinds(ev.Event | Note)
_DECISIONS = kinds(do.Decision)


def encode(record: Recorded | Sequence[do.Decision]) -> str:
    """An event, or its decisions, as JSON. The class name is ``kind``."""
    return dumps(record).decode()


def decode(text: str) -> Recorded:
    """The inverse of ``encode`` for events. Raises ``ValueError`` on other text."""
    return cast(Recorded, load_tagged(loads(text), _RECORDED))


def decode_decisions(text: str) -> list[do.Decision]:
    """The inverse of ``encode`` for decisions."""
    return [cast(do.Decision, load_tagged(each, _DECISIONS)) for each in loads(text)]
