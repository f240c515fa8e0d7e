"""What happened to jobs and nodes, in the past tense: what the scheduler is told."""

from __future__ import annotations

from dataclasses import dataclass

from rollpacker.core.types import Phase
from rollpacker.rollmux.jobs import JobSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class JobArrived:
    """A job asks to be placed."""

    spec: JobSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class PermitRequested:
    """A job is ready for a phase; its first is a rollout, and phases alternate."""

    job: str
    phase: Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class TailReached:
    """About 80% of the responses of a job's running rollout are done."""

    job: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseFinished:
    """A phase that held a permit is over.

    Args:
        seconds: what the phase took, or would have taken alone, without waiting and switching.
        token: of the permit; another than the current one is ignored (fencing).
    """

    job: str
    phase: Phase
    seconds: float
    token: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PermitLost:
    """A permit's lease ran out, or its process died: the phase has to be asked for again."""

    job: str
    token: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveFinished:
    """A job's state is loaded on the nodes it was moved to."""

    job: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnded:
    """A job is done, or was cancelled."""

    job: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFailed:
    """A node is gone with all that was on it."""

    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TimePassed:
    """Nothing happened, but ``Scheduler.next_look`` has come, or there is time for repacking."""


Event = (
    JobArrived
    | PermitRequested
    | TailReached
    | PhaseFinished
    | PermitLost
    | MoveFinished
    | JobEnded
    | NodeFailed
    | TimePassed
)
