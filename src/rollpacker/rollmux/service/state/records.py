"""What the daemon knows of jobs and permits beyond the scheduler."""

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
    """A phase on the timeline; ``end`` None while it runs."""

    job: str
    phase: Phase
    nodes: tuple[str, ...]
    start: float
    token: int
    end: float | None = None
    outcome: PhaseOutcome = "running"


@dataclass(slots=True)
class Lease:
    """A permit that is out.

    Args:
        key: of the request that it answers.
        granted: time.
        deadline: without a heartbeat it is lost then.
        fenced: no heartbeat extends it and nobody is told of it: something has to wait for its end.
        tail: its nodes were released but for the tail's.
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
        """Its phase on the timeline."""
        return Stretch(self.job, self.phase, self.nodes, self.granted, self.token, end, outcome)


@dataclass(slots=True)
class PendingMove:
    """A move that the job has not reported as finished; its id is the entry's number."""

    id: int
    decision: do.Move


@dataclass(slots=True)
class JobRecord:
    """A job, also after its end.

    Args:
        number: 0, 1, 2, ... by arrival.
        request: key of the permit request that waits.
        ending: it was told to end while a permit is out.
        uncounted_s: of its life so far, what its promise does not count: waiting for nodes.
        program: that agents start; None where they start nothing.
        by: whose token submitted it.
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
        """The start of its program that has not ended."""
        return None if self.program is None else self.program.running

    @property
    def outcome(self) -> JobOutcome:
        """How it ended, as far as anybody said; empty while it has not."""
        if self.ended is None:
            return ""
        told = "" if self.program is None else self.program.outcome
        if told != "failed" and self.done == self.spec.iterations:
            return "done"
        return told or "ended"


@dataclass(slots=True)
class Fence:
    """The end of a job, or the failure of a node, that waits until permits are over.

    Args:
        tokens: of those that are not over.
        why: of a node's failure.
        fenced: all tokens that it began with.
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
        """Whether nothing is waited for any more."""
        return not self.tokens


@dataclass(slots=True)
class Effects:
    """What one event did: decisions, and phases that are over."""

    decisions: list[do.Decision] = field(default_factory=list[do.Decision])
    closed: list[Stretch] = field(default_factory=list[Stretch])
