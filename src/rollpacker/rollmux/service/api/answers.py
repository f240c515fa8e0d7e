"""The daemon's answers, field by field, from which the API's description is generated."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, NotRequired, TypedDict

from rollpacker.core.codec import says
from rollpacker.core.types import Phase
from rollpacker.rollmux.model.program import JobProgram
from rollpacker.rollmux.service.api.bodies import NewJob, NewNode
from rollpacker.rollmux.service.api.roles import Role
from rollpacker.rollmux.service.state.attempts import Outcome
from rollpacker.rollmux.service.state.records import JobOutcome, JobState, NodeStatus, PhaseOutcome

if TYPE_CHECKING:  # as plain values, of this form
    _Spec = _Machine = _Program = dict[str, Any]
else:
    _Spec, _Machine, _Program = NewJob, NewNode, JobProgram
NodeState = Literal["free", "held", "reserved", "failing", "failed", "unknown"]
SloState = Literal["kept", "near", "behind", "missed"]


class Error(TypedDict):
    """An error. Some errors have more fields."""

    error: Annotated[str, says("One line with the problem and its field.")]
    code: NotRequired[Annotated[str | None, says("The reason, for programs.")]]


class Submitted(TypedDict):
    """An accepted job."""

    id: str
    seq: Annotated[int, says("Its number in the log.")]
    state: Annotated[JobState, says("`queued` if it waits for nodes.")]


class PermitView(TypedDict):
    """A lease of nodes for one phase."""

    token: Annotated[int, says("Grows with every permit, so that newer ones fence off older ones.")]
    phase: Phase
    nodes: list[str]
    ttl_s: Annotated[float, says("Seconds left from the time of the request.")]
    lease_s: Annotated[float, says("Seconds of a full lease.")]


class MoveView(TypedDict):
    """New nodes for a job."""

    id: int
    rollout: list[str]
    train: list[str]
    reason: Literal["repack", "guard", "failure", "drain", "resume"]
    memory_gb: Annotated[dict[str, float], says("GB of host memory that it takes on each node.")]


class Moving(TypedDict):
    """Instead of a permit: the job must change nodes first."""

    move: MoveView


class BeatAnswer(TypedDict):
    """An extended lease."""

    ttl_s: float
    lease_s: float
    release_tail: Annotated[bool, says("Move the rollout to a quarter of the workers.")]


class DoneAnswer(TypedDict):
    """A finished phase."""

    job: str
    phase: Phase
    done: Annotated[int, says("Iterations so far.")]
    next: Annotated[Phase | None, says("The phase to ask for (null when all iterations are done).")]


class GivenBack(TypedDict):
    """A phase that the job must ask for again."""

    job: str
    next: Phase | None


class TailTold(TypedDict):
    """Whether to release the tail's nodes now."""

    release_tail: bool


class EndedAnswer(TypedDict):
    """A job that has ended, or ends with its permit."""

    state: Literal["ended", "ending"]


class Changed(TypedDict):
    """A changed job."""

    state: Annotated[JobState, says("`held` once it has given its nodes back.")]
    held: bool
    priority: int


class Queued(TypedDict):
    """A job that waits for nodes."""

    position: Annotated[int, says("1 is next.")]
    of: int
    since_s: float
    reason: str
    starts_in_s: Annotated[float | None, says("Expected seconds to its start (null if unknown).")]
    starts_between_s: Annotated[
        tuple[float, float | None] | None,
        says("Range of `starts_in_s` (null if unknown). The last value is null for perhaps never."),
    ]


class AttemptTold(TypedDict):
    """One start of a program."""

    number: int
    node: str
    members: Annotated[list[str], says("The job's other nodes with processes of the attempt.")]
    began: float
    ended: float | None
    code: Annotated[int | None, says("Exit code (null while it runs, or if its node failed).")]
    lost: Annotated[list[str], says("Members that failed.")]
    broken: Annotated[bool, says("Whether its process on a member failed.")]


class StartedProgram(TypedDict):
    """A job's program, without its environment, and its attempts."""

    program: dict[str, Any]
    attempts: list[AttemptTold]
    used: Annotated[int, says("Restarts since the job's last finished iteration.")]
    nodes_lost: Annotated[int, says("Nodes that failed under it since (3 end the program).")]
    done: Annotated[int, says("Iterations at the time of the last restart.")]
    outcome: Annotated[Outcome, says("Empty while it may run.")]
    lead: Annotated[str | None, says("The node for its first process.")]
    ready_at: Annotated[float | None, says("Earliest next start (null if it runs or is over).")]


class JobView(TypedDict):
    """A live or ended job."""

    id: str
    number: Annotated[int, says("0, 1, 2, ... by arrival.")]
    state: JobState
    spec: _Spec
    by: Annotated[str, says("Name of the token that submitted it (empty if unknown).")]
    held: Annotated[bool, says("It gives its nodes back and gets none.")]
    arrived_s: float
    ended_s: float | None
    outcome: Annotated[JobOutcome, says("Empty while it lives, `ended` without a result.")]
    elapsed_s: float
    uncounted_s: Annotated[float, says("Seconds of waiting that its SLO does not count.")]
    queue: Queued | None
    done: Annotated[int, says("Iterations so far.")]
    next: Phase | None
    group: int | None
    rollout_nodes: list[str]
    train_nodes: list[str]
    permit: PermitView | None
    move: MoveView | None
    program: Annotated[StartedProgram | None, says("Null if agents start nothing.")]
    solo_s: Annotated[float, says("Seconds that its phases would have taken alone.")]
    slo_slack_s: Annotated[float, says("Seconds that it may still lose within its SLO.")]
    slo_state: SloState
    slowdown: float | None
    recent_s: NotRequired[
        Annotated[
            list[tuple[float, float]],
            says("Seconds alone of both phases in its last iterations (only for a single job)."),
        ]
    ]


class Jobs(TypedDict):
    """All jobs."""

    jobs: list[JobView]


class NodeView(TypedDict):
    """A node. Its state is ``unknown`` if it is not in the inventory."""

    name: str
    pool: Phase | None
    state: NodeState
    group: int | None
    memory_gb: Annotated[dict[str, float], says("GB of host memory by job.")]
    total_gb: float
    token: Annotated[int, says("The highest token of a permit on it, or -1.")]
    agent: Annotated[bool, says("Whether its agent's silence counts as a failure.")]
    reported_s: Annotated[float | None, says("Seconds since its agent reported.")]
    status: NotRequired[
        Annotated[NodeStatus, says("Only named nodes have this and the next fields.")]
    ]
    why: NotRequired[Annotated[str, says("Why it is not open, or empty.")]]
    status_s: NotRequired[Annotated[float | None, says("Its age in seconds (null for never).")]]
    machine: NotRequired[_Machine]


class NodeChanged(TypedDict):
    """An opened or closed node."""

    node: str
    status: NodeStatus
    jobs: Annotated[list[str], says("Jobs on it now.")]


class NodeRemovedAnswer(TypedDict):
    """A node that left the inventory."""

    node: str


class Registered(TypedDict):
    """A registered node."""

    status: NodeStatus
    ttl_s: Annotated[float, says("Seconds of silence after which it counts as failed.")]


class WantedAttempt(TypedDict):
    """A program that belongs on a node."""

    job: str
    number: int
    program: _Program
    rank: Annotated[int, says("Rank of the node in the job (0 has the driver).")]
    nodes: Annotated[list[str], says("The job's nodes by rank, rollout nodes first.")]
    stop: Annotated[bool, says("Whether the program must end.")]


class AliveAnswer(TypedDict):
    """The answer to a node's report."""

    ttl_s: Annotated[float, says("Seconds of silence after which the node counts as failed.")]
    attempts: NotRequired[
        Annotated[list[WantedAttempt], says("All programs for the node, if its agent starts some.")]
    ]


class PrintedAnswer(TypedDict):
    """The daemon's part of a log."""

    have: Annotated[int, says("Stored bytes.")]
    full: Annotated[bool, says("Whether it takes no more.")]


class Log(TypedDict):
    """A piece of an attempt's output."""

    attempt: int
    node: str
    code: int | None
    at: Annotated[int, says("First byte.")]
    data: Annotated[str, says("In base64.")]
    over: Annotated[bool, says("Whether this is the end of a finished attempt.")]


class NodeGone(TypedDict):
    """A node that has failed, or fails when its permits are over."""

    state: Literal["failed", "failing"]
    jobs: list[str]


class Drained(TypedDict):
    """Whether new jobs are refused."""

    draining: bool
    jobs: Annotated[int, says("Live jobs.")]


class TokenView(TypedDict):
    """A token's holder."""

    name: str
    role: Role
    team: str
    made_s: Annotated[float, says("Wall-clock time of its creation.")]


class TokenList(TypedDict):
    """All tokens except the operator's."""

    tokens: list[TokenView]


class TokenMade(TypedDict):
    """A new token."""

    name: str
    token: Annotated[str, says("Shown once and stored nowhere.")]


class Health(TypedDict):
    """Whether the daemon can work."""

    status: str


class TeamJobs(TypedDict):
    """Numbers of a team's live jobs."""

    placed: int
    waiting: int


class TeamView(TypedDict):
    """A team's nodes of each pool. Shared nodes count in part."""

    name: Annotated[str, says("Empty for jobs without a team.")]
    guaranteed: dict[Phase, float]
    used: dict[Phase, float]
    borrowed: dict[Phase, float]
    share: Annotated[float, says("Use over guarantee in the fuller pool. The least is next.")]
    jobs: TeamJobs
    owed: Annotated[bool, says("Whether one of its jobs waits for guaranteed nodes.")]
    priority: Annotated[int | None, says("Highest priority of its waiting jobs.")]


class GroupView(TypedDict):
    """Jobs that share nodes."""

    id: int
    epoch: int
    jobs: list[str]
    rollout: list[str]
    train: list[str]


class Cost(TypedDict):
    """Dollars per hour, or numbers of nodes if they are owned."""

    now: float
    solo: float


class Status(TypedDict):
    """The whole cluster."""

    now: float
    seq: int
    draining: bool
    named: Annotated[bool, says("Whether the nodes are owned, not rented.")]
    lease_s: float
    cost_per_h: Cost
    counts: dict[JobState, int]
    nodes: list[NodeView]
    teams: list[TeamView]
    groups: list[GroupView]
    memory_cap_gb: float
    jobs: Annotated[list[JobView], says("Live jobs.")]
    ended: Annotated[list[JobView], says("The last fifty ended jobs.")]


class PhaseRun(TypedDict):
    """A running or finished phase."""

    job: str
    number: int
    phase: Phase
    nodes: list[str]
    start: float
    end: float | None
    token: int
    outcome: PhaseOutcome


class Timeline(TypedDict):
    """Phases by their start."""

    now: float
    phases: list[PhaseRun]
