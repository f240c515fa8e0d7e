"""Events for the scheduler: reports about jobs and nodes."""

from __future__ import annotations

from typing import Literal

from rollpacker.core.codec import Tagged
from rollpacker.core.types import Phase
from rollpacker.rollmux.model.inventory import Machine
from rollpacker.rollmux.model.jobs import JobSpec


class JobArrived(Tagged, frozen=True, kw_only=True):
    """A job asks to be placed. ``by`` names the token that submitted it."""

    spec: JobSpec
    programs: tuple[bool, bool] = (False, False)
    by: str = ""


class JobChanged(Tagged, frozen=True, kw_only=True):
    """A user changes how a job is treated (None keeps a setting).

    A held job gives its nodes back after its iteration, and gets none.
    """

    job: str
    held: bool | None = None
    priority: int | None = None


class PermitRequested(Tagged, frozen=True, kw_only=True):
    """A job is ready for a phase. The first is a rollout, and phases alternate."""

    job: str
    phase: Phase


class TailReached(Tagged, frozen=True, kw_only=True):
    """About 80% of the responses of a job's running rollout are done."""

    job: str


class PhaseFinished(Tagged, frozen=True, kw_only=True):
    """A phase took ``seconds`` alone, without waiting and switching.

    The event is ignored unless ``token`` is that of the job's current permit (fencing).
    """

    job: str
    phase: Phase
    seconds: float
    token: int


class PermitLost(Tagged, frozen=True, kw_only=True):
    """A permit expired, or its process died. The job must ask for the phase again."""

    job: str
    token: int


class MoveFinished(Tagged, frozen=True, kw_only=True):
    """A job's state is loaded on its new nodes."""

    job: str


class JobEnded(Tagged, frozen=True, kw_only=True):
    """A job is done or was cancelled."""

    job: str


class NodeFailed(Tagged, frozen=True, kw_only=True):
    """A node and all its state are lost. ``why`` is for users."""

    node: str
    why: str = ""


class NodeJoined(Tagged, frozen=True, kw_only=True):
    """A named node joins, for the first time or again."""

    machine: Machine


class AgentHeard(Tagged, frozen=True, kw_only=True):
    """A named node's agent reports first, or begins or ceases to start programs."""

    node: str
    programs: bool


class NodeClosed(Tagged, frozen=True, kw_only=True):
    """A node takes nothing new. ``draining`` also moves its jobs. ``why`` is for users."""

    node: str
    status: Literal["cordoned", "draining", "set_aside"]
    why: str = ""


class NodeOpened(Tagged, frozen=True, kw_only=True):
    """A closed node is used again."""

    node: str


class NodeRemoved(Tagged, frozen=True, kw_only=True):
    """An unused node leaves the inventory."""

    node: str


class TimePassed(Tagged, frozen=True, kw_only=True):
    """``Scheduler.next_look`` has come, or there is time for repacking."""


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
