"""What the daemon answers, field by field: commands and views make it, clients read it, and the
description of the API says it."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import BaseModel, ConfigDict, GetPydanticSchema, with_config
from typing_extensions import TypedDict

from rollpacker.core.types import Phase
from rollpacker.rollmux.service.api.bodies import NewJob, NewNode, NewProgram
from rollpacker.rollmux.service.state.attempts import Outcome
from rollpacker.rollmux.service.state.records import JobOutcome, JobState, NodeStatus, PhaseOutcome


def _like(body: type[BaseModel]) -> GetPydanticSchema:
    return GetPydanticSchema(lambda _kind, handler: handler(body))


_Spec = Annotated[dict[str, Any], _like(NewJob)]
_Machine = Annotated[dict[str, Any], _like(NewNode)]
_Program = Annotated[dict[str, Any], _like(NewProgram)]
NodeState = Literal["free", "held", "reserved", "failing", "failed", "unknown"]
SloState = Literal["kept", "near", "behind", "missed"]


@with_config(ConfigDict(extra="forbid", use_attribute_docstrings=True))
class Told(TypedDict):
    """An answer; docstrings of fields are their descriptions."""


class Nothing(Told):
    """An object without fields."""


class Submitted(Told):
    """A job that was taken."""

    id: str
    seq: int
    """Its number in the log."""
    state: JobState
    """``queued`` where it waits for nodes."""


class PermitView(Told):
    """A lease of nodes for one phase."""

    token: int
    """Grows with every permit: newer ones fence older ones off."""
    phase: Phase
    nodes: list[str]
    ttl_s: float
    """Seconds left of the lease now: it ends so long after the request was sent."""
    lease_s: float
    """Seconds of a full lease."""


class MoveView(Told):
    """Where a job has to go."""

    id: int
    rollout: list[str]
    train: list[str]
    reason: Literal["repack", "guard", "failure", "drain", "resume"]
    memory_gb: dict[str, float]
    """Host memory to be taken on each node."""


class Moving(Told):
    """In place of a permit: the job has to change nodes first."""

    move: MoveView


class BeatAnswer(Told):
    """A lease that has its full time again."""

    ttl_s: float
    lease_s: float
    release_tail: bool
    """Another job has the nodes of a rollout's tail: the rest goes to a quarter of the workers."""


class DoneAnswer(Told):
    """A phase that is over."""

    job: str
    phase: Phase
    done: int
    """Iterations so far."""
    next: Phase | None
    """The phase to ask for; null when all iterations are done."""


class GivenBack(Told):
    """A phase that has to be asked for again."""

    job: str
    next: Phase | None


class TailTold(Told):
    """Whether to release the tail's nodes now."""

    release_tail: bool


class EndedAnswer(Told):
    """A job that is over, or will be when its permit is."""

    state: Literal["ended", "ending"]


class Queued(Told):
    """A job that waits for nodes."""

    position: int
    """1 is the next one."""
    of: int
    since_s: float
    reason: str
    starts_in_s: float | None
    """As expected; null where nobody can say, or not yet."""
    starts_between_s: tuple[float, float | None] | None
    """What chance makes of it; null where not enough is known, the latter if it may be never."""


class AttemptTold(Told):
    """One start of a program."""

    number: int
    node: str
    members: list[str]
    """Its job's other nodes, where it has processes too: some ``lost``, or one ``broken``."""
    began: float
    ended: float | None
    code: int | None
    """Of its exit; null while it runs, or where its node failed."""
    lost: list[str]
    broken: bool


class StartedProgram(Told):
    """A job's program, without its environment, and what became of it."""

    program: dict[str, Any]
    attempts: list[AttemptTold]
    used: int
    """Restarts since the job last got on."""
    done: int
    """Iterations at the last of them."""
    outcome: Outcome
    """Empty while it may run."""
    lead: str | None
    """The node where it belongs."""
    ready_at: float | None
    """When it may start; null while it runs, and where it does not start again."""


class JobView(Told):
    """A job, also one that has ended."""

    id: str
    number: int
    """0, 1, 2, ... by arrival."""
    state: JobState
    spec: _Spec
    arrived_s: float
    ended_s: float | None
    outcome: JobOutcome
    """How it ended: ``ended`` where its driver said no more; empty while it has not."""
    elapsed_s: float
    uncounted_s: float
    """Of its life, what its promise does not count: waiting for nodes."""
    queue: Queued | None
    done: int
    """Iterations so far."""
    next: Phase | None
    group: int | None
    rollout_nodes: list[str]
    train_nodes: list[str]
    permit: PermitView | None
    move: MoveView | None
    program: StartedProgram | None
    """Null where agents start nothing."""
    solo_s: float
    """What its phases would have taken alone."""
    slo_slack_s: float
    """What it may still lose without breaking its promise."""
    slo_state: SloState
    slowdown: float | None
    recent_s: NotRequired[list[tuple[float, float]]]
    """Seconds of rollout and training, alone, of its last iterations; where one job is asked for,
    not all."""


class Jobs(Told):
    """All jobs."""

    jobs: list[JobView]


class NodeView(Told):
    """A node; one that nobody knows has state ``unknown``."""

    name: str
    pool: Phase | None
    state: NodeState
    group: int | None
    memory_gb: dict[str, float]
    """By job."""
    total_gb: float
    token: int
    """The highest that was permitted on it, or -1."""
    agent: bool
    """Whether its agent's silence is a failure."""
    reported_s: float | None
    """Seconds since its agent reported."""
    status: NotRequired[NodeStatus]
    """Of named nodes, as the following."""
    why: NotRequired[str]
    machine: NotRequired[_Machine]


class NodeChanged(Told):
    """A node that was opened or closed."""

    node: str
    status: NodeStatus
    jobs: list[str]
    """On it now."""


class NodeRemovedAnswer(Told):
    """A node that left the inventory."""

    node: str


class Registered(Told):
    """A node whose agent was heard."""

    status: NodeStatus
    ttl_s: float
    """Seconds of silence after which it counts as failed."""


class WantedAttempt(Told):
    """A program that belongs on a node."""

    job: str
    number: int
    program: _Program
    rank: int
    """Of the node among the job's: 0 has its driver."""
    nodes: list[str]
    """Of the job, by rank; the rollout nodes come first."""
    stop: bool
    """It is to end there."""


class AliveAnswer(Told):
    """An agent that was heard."""

    ttl_s: float
    """Seconds of silence after which the node counts as failed."""
    attempts: NotRequired[list[WantedAttempt]]
    """All that is to be there, where the agent starts programs."""


class PrintedAnswer(Told):
    """What the daemon has of a log."""

    have: int
    """Bytes."""
    full: bool
    """It takes no more."""


class Log(Told):
    """A piece of what an attempt printed."""

    attempt: int
    node: str
    code: int | None
    at: int
    """The byte at which it begins."""
    data: str
    """In base64."""
    over: bool
    """The attempt has ended, and this is the end of it."""


class NodeGone(Told):
    """A node that has failed, or will have when permits on it are over."""

    state: Literal["failed", "failing"]
    jobs: list[str]


class Drained(Told):
    """Whether new jobs are turned away."""

    draining: bool
    jobs: int
    """Live ones."""


class Health(Told):
    """Whether the daemon can work."""

    status: str


class TeamJobs(Told):
    """Live jobs of a team."""

    placed: int
    waiting: int


class TeamView(Told):
    """What a team has of each pool, in nodes; shared ones count in part."""

    name: str
    """Empty for the jobs of no team."""
    guaranteed: dict[Phase, float]
    used: dict[Phase, float]
    borrowed: dict[Phase, float]
    share: float
    """The larger of both pools' shares of what it is guaranteed: who has least is next."""
    jobs: TeamJobs
    owed: bool
    """Whether a job of it waits for nodes that are its own."""
    priority: int | None
    """The highest of its jobs that wait."""


class GroupView(Told):
    """Jobs that share nodes."""

    id: int
    epoch: int
    jobs: list[str]
    rollout: list[str]
    train: list[str]


class Cost(Told):
    """Dollars per hour; of an owner's nodes: nodes."""

    now: float
    solo: float


class Status(Told):
    """The whole cluster."""

    now: float
    seq: int
    draining: bool
    named: bool
    """Whether its nodes are an owner's."""
    lease_s: float
    cost_per_h: Cost
    counts: dict[JobState, int]
    nodes: list[NodeView]
    teams: list[TeamView]
    groups: list[GroupView]
    memory_cap_gb: float
    jobs: list[JobView]
    """Live ones."""
    ended: list[JobView]
    """The last fifty."""


class PhaseRun(Told):
    """A phase that runs or ran."""

    job: str
    number: int
    phase: Phase
    nodes: list[str]
    start: float
    end: float | None
    token: int
    outcome: PhaseOutcome


class Timeline(Told):
    """Phases by their start."""

    now: float
    phases: list[PhaseRun]
