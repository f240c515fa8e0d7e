"""What the daemon itself records, besides the scheduler's events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from rollpacker.core.codec import Tagged, dumps, kinds, load_tagged, loads
from rollpacker.rollmux.model import decisions as do
from rollpacker.rollmux.model import events as ev
from rollpacker.rollmux.model.program import JobProgram


class DrainSet(Tagged, frozen=True, kw_only=True):
    """Whether new jobs are turned away."""

    draining: bool


class AgentJoined(Tagged, frozen=True, kw_only=True):
    """A node's agent reported for the first time; from now on its silence is a failure.

    Args:
        agent: its identity; empty where it told none.
    """

    node: str
    agent: str = ""


class NodeFenced(Tagged, frozen=True, kw_only=True):
    """A node failed while permits of its jobs are out; the scheduler hears it when they are over.

    Args:
        tokens: of those permits; no heartbeat extends them any more.
        why: for people.
    """

    node: str
    tokens: tuple[int, ...]
    why: str = ""


class EndFenced(Tagged, frozen=True, kw_only=True):
    """A job is to end while its permit is out; the scheduler hears it when the permit is over."""

    job: str
    token: int


class ProgramGiven(Tagged, frozen=True, kw_only=True):
    """Agents are to start a job's program."""

    job: str
    program: JobProgram


class AttemptBegun(Tagged, frozen=True, kw_only=True):
    """The agent of a node is told to start a job's program, for the ``number``-th time.

    Args:
        members: the job's other nodes, where the program has processes too.
    """

    job: str
    number: int
    node: str
    members: tuple[str, ...] = ()


class AttemptEnded(Tagged, frozen=True, kw_only=True):
    """An agent has seen the end of a program.

    Args:
        told: to end: its job has other nodes by now, or none.
    """

    job: str
    code: int
    told: bool


class MemberFailed(Tagged, frozen=True, kw_only=True):
    """A process on another node than the driver's has failed: the attempt ends as failed."""

    job: str
    node: str
    code: int


OfProgram = ProgramGiven | AttemptBegun | AttemptEnded | MemberFailed
Note = DrainSet | AgentJoined | NodeFenced | EndFenced | OfProgram
Recorded = ev.Event | Note
"""All that an entry of the log can hold."""

_RECORDED = kinds(ev.Event | Note)
_DECISIONS = kinds(do.Decision)


def encode(record: Recorded | Sequence[do.Decision]) -> str:
    """An event, or what it led to, as JSON; the class name is ``kind``."""
    return dumps(record).decode()


def decode(text: str) -> Recorded:
    """The inverse of ``encode`` for events. Raises ``ValueError`` on what is no event."""
    return cast(Recorded, load_tagged(loads(text), _RECORDED))


def decode_decisions(text: str) -> list[do.Decision]:
    """The inverse of ``encode`` for decisions."""
    return [cast(do.Decision, load_tagged(each, _DECISIONS)) for each in loads(text)]
