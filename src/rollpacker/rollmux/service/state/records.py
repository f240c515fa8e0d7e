"""The daemon's records of jobs and permits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from rollpacker.core.types import Phase
from rollpacker.rollmux.model import decisions as do
from rollpacker.rollmux.model.inventory import Status
from rollpacker.rollmux.model.jobs import JobSpec
from rollpacker.rollmux.service.state.attempts import ProgramRun, ProgramRuns

JobState = Literal[
    "queued", "held", "idle", "waiting", "running", "moving", "failing", "ending", "ended"
]
JobOutcome = Literal["", "done", "failed", "stopped", "ended"]
PhaseOutcome = Literal["running", "done", "lost"]
NodeStatus = Status | Literal["drained"]


@dataclass(slots=True)
class Stretch:
    """A phase on the timeline. ``end`` is None while it runs."""

    job: str
    phase: Phase
    nodes: tuple[str, ...]
    start: float
    token: int
    end: float | None = None
    outcome: PhaseOutcome = "running"


@dataclass(slots=True)
class Lease:
    """A live permit.

    Args:
        key: key of the request that it answers.
        deadline: time of its loss without a heartbeat.
        fenced: whether it is hidden and cannot be extended, since an event waits for its end.
        tail: whether its nodes were released, except for those of the tail.
        beat: key of the last heartbeat.
    """

    token: int
    job: str
    phase: Phase
    nodes: tuple[str, ...]
    key: str | None
    granted: float
    deadline: float
    fenced: bool = False
    tail: bool = False
    beat: str = ""

    def stretch(self, end: float | None = None, outcome: PhaseOutcome = "running") -> Stretch:
        return Stretch(self.job, self.phase, self.nodes, self.granted, self.token, end, outcome)


@dataclass(slots=True)
class PendingMove:
    """A move that the job has not reported as finished. Its id is the entry's number."""

    id: int
    decision: do.Move


@dataclass(slots=True)
class JobRecord:
    """A live or ended job.

    Args:
        request: key of the waiting permit request.
        ending: whether it must end but holds a permit.
        uncounted_s: seconds of waiting that its SLO does not count.
        program: program that agents start (None if they start nothing).
        by: name of the token that submitted it.
    """

    number: int
    spec: JobSpec
    arrived: float
    ended: float | None = None
    request: str | None = None
    token: int | None = None
    move: PendingMove | None = None
    ending: bool = False
    done: int = 0
    solo_s: float = 0.0
    uncounted_s: float = 0.0
    program: ProgramRuns | None = None
    by: str = ""

    @property
    def running(self) -> ProgramRun | None:
        return None if self.program is None else self.program.running

    @property
    def outcome(self) -> JobOutcome:
        """The result as far as known (empty for a live job)."""
        if self.ended is None:
            return ""
        told = "" if self.program is None else self.program.outcome
        if told != "failed" and self.done == self.spec.iterations:
            return "done"
        return told or "ended"


@dataclass(slots=True)
class Fence:
    """The end of a job or the failure of a node, which waits for the end of permits.

    ``tokens`` are those of live permits, and ``fenced`` all tokens at the beginning.
    """

    tokens: set[int]
    job: str | None = None
    node: str | None = None
    why: str = ""
    fenced: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        self.fenced = frozenset(self.tokens)

    @property
    def ready(self) -> bool:
        return not self.tokens


@dataclass(slots=True)
class Effects:
    """The decisions and finished phases of one event."""

    decisions: list[do.Decision] = field(default_factory=list[do.Decision])
    closed: list[Stretch] = field(default_factory=list[Stretch])
