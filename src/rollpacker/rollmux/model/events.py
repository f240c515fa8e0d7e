"""What happened to jobs and nodes, in the past tense: what the scheduler is told."""

from __future__ import annotations

from typing import Literal

from rollpacker.core.codec import Tagged
from rollpacker.core.types import Phase
from rollpacker.rollmux.model.inventory import Machine
from rollpacker.rollmux.model.jobs import JobSpec


class JobArrived(Tagged, frozen=True, kw_only=True):
    """A job asks to be placed.

    Args:
        programs: of either pool: whether agents start its programs there.
        by: whose token submitted it.
    """

    spec: JobSpec
    programs: tuple[bool, bool] = (False, False)
    by: str = ""


class JobChanged(Tagged, frozen=True, kw_only=True):
    """Somebody wants a job to be treated otherwise; None for as it was.

    Args:
        held: a held job gives its nodes back when its iteration is over, and gets none.
        priority: inside its team, in place of its specification's.
    """

    job: str
    held: bool | None = None
    priority: int | None = None


class PermitRequested(Tagged, frozen=True, kw_only=True):
    """A job is ready for a phase; its first is a rollout, and phases alternate."""

    job: str
    phase: Phase


class TailReached(Tagged, frozen=True, kw_only=True):
    """About 80% of the responses of a job's running rollout are done."""

    job: str


class PhaseFinished(Tagged, frozen=True, kw_only=True):
    """A phase that held a permit is over.

    Args:
        seconds: what the phase took, or would have taken alone, without waiting and switching.
        token: of the permit; another than the current one is ignored (fencing).
    """

    job: str
    phase: Phase
    seconds: float
    token: int


class PermitLost(Tagged, frozen=True, kw_only=True):
    """A permit's lease ran out, or its process died: the phase has to be asked for again."""

    job: str
    token: int


class MoveFinished(Tagged, frozen=True, kw_only=True):
    """A job's state is loaded on the nodes it was moved to."""

    job: str


class JobEnded(Tagged, frozen=True, kw_only=True):
    """A job is done, or was cancelled."""

    job: str


class NodeFailed(Tagged, frozen=True, kw_only=True):
    """A node is gone with all that was on it.

    Args:
        why: for people.
    """

    node: str
    why: str = ""


class NodeJoined(Tagged, frozen=True, kw_only=True):
    """A named node is there, for the first time or again."""

    machine: Machine


class AgentHeard(Tagged, frozen=True, kw_only=True):
    """A named node's agent reports for the first time, or begins or ceases to start programs."""

    node: str
    programs: bool


class NodeClosed(Tagged, frozen=True, kw_only=True):
    """Nothing new comes to a node; ``draining`` also moves its jobs elsewhere.

    Args:
        why: for people.
    """

    node: str
    status: Literal["cordoned", "draining", "set_aside"]
    why: str = ""


class NodeOpened(Tagged, frozen=True, kw_only=True):
    """A node that was closed is used again."""

    node: str


class NodeRemoved(Tagged, frozen=True, kw_only=True):
    """A node that nobody is on leaves the inventory."""

    node: str


class TimePassed(Tagged, frozen=True, kw_only=True):
    """Nothing happened, but ``Scheduler.next_look`` has come, or there is time for repacking."""


Event = (
    JobArrived
    | JobChanged
    | PermitRequested
    | TailReached
    | PhaseFinished
    | PermitLost
    | MoveFinished
    | JobEnded
    | NodeFailed
    | NodeJoined
    | AgentHeard
    | NodeClosed
    | NodeOpened
    | NodeRemoved
    | TimePassed
)
