"""What the daemon answers, field by field: commands and views make it, clients read it, and the
description of the API says it."""

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
    """What is wrong; some errors tell more beside."""

    error: Annotated[str, says("One line: what is wrong, and which field.")]
    code: NotRequired[
        Annotated[str | None, says("The reason for programs, where there are several.")]
    ]


class Submitted(TypedDict):
    """A job that was taken."""

    id: str
    seq: Annotated[int, says("Its number in the log.")]
    state: Annotated[JobState, says("`queued` where it waits for nodes.")]


class PermitView(TypedDict):
    """A lease of nodes for one phase."""

    token: Annotated[int, says("Grows with every permit: newer ones fence older ones off.")]
    phase: Phase
    nodes: list[str]
    ttl_s: Annotated[float, says("Seconds left, counted from when the request was sent.")]
    lease_s: Annotated[float, says("Seconds of a full lease.")]


class MoveView(TypedDict):
    """Where a job has to go."""

    id: int
    rollout: list[str]
    train: list[str]
    reason: Literal["repack", "guard", "failure", "drain", "resume"]
    memory_gb: Annotated[dict[str, float], says("Host memory to be taken on each node.")]


class Moving(TypedDict):
    """In place of a permit: the job has to change nodes first."""

    move: MoveView


class BeatAnswer(TypedDict):
    """A lease that has its full time again."""

    ttl_s: float
    lease_s: float
    release_tail: Annotated[bool, says("Others have nodes: move to a quarter of the workers.")]


class DoneAnswer(TypedDict):
    """A phase that is over."""

    job: str
    phase: Phase
    done: Annotated[int, says("Iterations so far.")]
    next: Annotated[Phase | None, says("The phase to ask for; null when all iterations are done.")]


class GivenBack(TypedDict):
    """A phase that has to be asked for again."""

    job: str
    next: Phase | None


class TailTold(TypedDict):
    """Whether to release the tail's nodes now."""

    release_tail: bool


class EndedAnswer(TypedDict):
    """A job that is over, or will be when its permit is."""

    state: Literal["ended", "ending"]


class Changed(TypedDict):
    """A job that is treated otherwise."""

    state: Annotated[JobState, says("`held` once it has given its nodes back.")]
    held: bool
    priority: int


class Queued(TypedDict):
    """A job that waits for nodes."""

    position: Annotated[int, says("1 is the next one.")]
    of: int
    since_s: float
    reason: str
    starts_in_s: Annotated[
        float | None, says("As expected; null where nobody can say, or not yet.")
    ]
    starts_between_s: Annotated[
        tuple[float, float | None] | None,
        says("The range that chance allows; null: not known; the latter null: perhaps never."),
    ]


class AttemptTold(TypedDict):
    """One start of a program."""

    number: int
    node: str
    members: Annotated[list[str], says("Its job's other nodes, where it has processes too.")]
    began: float
    ended: float | None
    code: Annotated[int | None, says("Of its exit; null while it runs, or where its node failed.")]
    lost: Annotated[list[str], says("Members that failed.")]
    broken: Annotated[bool, says("Its process on a member failed.")]


class StartedProgram(TypedDict):
    """A job's program, without its environment, and what became of it."""

    program: dict[str, Any]
    attempts: list[AttemptTold]
    used: Annotated[int, says("Restarts since the job last got on.")]
    nodes_lost: Annotated[int, says("Nodes that failed under it since; after 3 it has failed.")]
    done: Annotated[int, says("Iterations at the last of them.")]
    outcome: Annotated[Outcome, says("Empty while it may run.")]
    lead: Annotated[str | None, says("The node where it belongs.")]
    ready_at: Annotated[float | None, says("When it may start; null: it runs, or never will.")]


class JobView(TypedDict):
    """A job, also one that has ended."""

    id: str
    number: Annotated[int, says("0, 1, 2, ... by arrival.")]
    state: JobState
    spec: _Spec
    by: Annotated[str, says("Whose token submitted it; empty where nobody wrote it down.")]
    held: Annotated[bool, says("It gets no nodes, and gives back those that it has.")]
    arrived_s: float
    ended_s: float | None
    outcome: Annotated[JobOutcome, says("Empty: not yet; `ended`: its driver said no more.")]
    elapsed_s: float
    uncounted_s: Annotated[float, says("Waiting for nodes, which its SLO does not count.")]
    queue: Queued | None
    done: Annotated[int, says("Iterations so far.")]
    next: Phase | None
    group: int | None
    rollout_nodes: list[str]
    train_nodes: list[str]
    permit: PermitView | None
    move: MoveView | None
    program: Annotated[StartedProgram | None, says("Null where agents start nothing.")]
    solo_s: Annotated[float, says("What its phases would have taken alone.")]
    slo_slack_s: Annotated[float, says("What it may still lose without missing its SLO.")]
    slo_state: SloState
    slowdown: float | None
    recent_s: NotRequired[
        Annotated[
            list[tuple[float, float]],
            says("Solo seconds of both phases, of its last iterations; of a single job only."),
        ]
    ]


class Jobs(TypedDict):
    """All jobs."""

    jobs: list[JobView]


class NodeView(TypedDict):
    """A node; one that nobody knows has state ``unknown``."""

    name: str
    pool: Phase | None
    state: NodeState
    group: int | None
    memory_gb: Annotated[dict[str, float], says("By job.")]
    total_gb: float
    token: Annotated[int, says("The highest that was permitted on it, or -1.")]
    agent: Annotated[bool, says("Whether its agent's silence is a failure.")]
    reported_s: Annotated[float | None, says("Seconds since its agent reported.")]
    status: NotRequired[Annotated[NodeStatus, says("Of named nodes, as the following.")]]
    why: NotRequired[Annotated[str, says("Why it is not open; empty where it is.")]]
    status_s: NotRequired[
        Annotated[float | None, says("Seconds since its status changed; null for never.")]
    ]
    machine: NotRequired[_Machine]


class NodeChanged(TypedDict):
    """A node that was opened or closed."""

    node: str
    status: NodeStatus
    jobs: Annotated[list[str], says("On it now.")]


class NodeRemovedAnswer(TypedDict):
    """A node that left the inventory."""

    node: str


class Registered(TypedDict):
    """A node whose agent was heard."""

    status: NodeStatus
    ttl_s: Annotated[float, says("Seconds of silence after which it counts as failed.")]


class WantedAttempt(TypedDict):
    """A program that belongs on a node."""

    job: str
    number: int
    program: _Program
    rank: Annotated[int, says("Of the node among the job's: 0 has its driver.")]
    nodes: Annotated[list[str], says("Of the job, by rank; the rollout nodes come first.")]
    stop: Annotated[bool, says("It is to end there.")]


class AliveAnswer(TypedDict):
    """An agent that was heard."""

    ttl_s: Annotated[float, says("Seconds of silence after which the node counts as failed.")]
    attempts: NotRequired[
        Annotated[list[WantedAttempt], says("All that is to be there, of agents with programs.")]
    ]


class PrintedAnswer(TypedDict):
    """What the daemon has of a log."""

    have: Annotated[int, says("Bytes.")]
    full: Annotated[bool, says("It takes no more.")]


class Log(TypedDict):
    """A piece of what an attempt printed."""

    attempt: int
    node: str
    code: int | None
    at: Annotated[int, says("The byte at which it begins.")]
    data: Annotated[str, says("In base64.")]
    over: Annotated[bool, says("The attempt has ended, and this is the end of it.")]


class NodeGone(TypedDict):
    """A node that has failed, or will have when permits on it are over."""

    state: Literal["failed", "failing"]
    jobs: list[str]


class Drained(TypedDict):
    """Whether new jobs are turned away."""

    draining: bool
    jobs: Annotated[int, says("Live ones.")]


class TokenView(TypedDict):
    """Whose a token is."""

    name: str
    role: Role
    team: str
    made_s: Annotated[float, says("Of the wall clock.")]


class TokenList(TypedDict):
    """Those besides the operator's."""

    tokens: list[TokenView]


class TokenMade(TypedDict):
    """A new token."""

    name: str
    token: Annotated[str, says("It is kept nowhere, and told once.")]


class Health(TypedDict):
    """Whether the daemon can work."""

    status: str


class TeamJobs(TypedDict):
    """Live jobs of a team."""

    placed: int
    waiting: int


class TeamView(TypedDict):
    """What a team has of each pool, in nodes; shared ones count in part."""

    name: Annotated[str, says("Empty for the jobs of no team.")]
    guaranteed: dict[Phase, float]
    used: dict[Phase, float]
    borrowed: dict[Phase, float]
    share: Annotated[float, says("Of its guarantee, in the fuller pool: who has least is next.")]
    jobs: TeamJobs
    owed: Annotated[bool, says("Whether a job of it waits for nodes that are its own.")]
    priority: Annotated[int | None, says("The highest of its jobs that wait.")]


class GroupView(TypedDict):
    """Jobs that share nodes."""

    id: int
    epoch: int
    jobs: list[str]
    rollout: list[str]
    train: list[str]


class Cost(TypedDict):
    """Dollars per hour; of an owner's nodes: nodes."""

    now: float
    solo: float


class Status(TypedDict):
    """The whole cluster."""

    now: float
    seq: int
    draining: bool
    named: Annotated[bool, says("Whether its nodes are an owner's.")]
    lease_s: float
    cost_per_h: Cost
    counts: dict[JobState, int]
    nodes: list[NodeView]
    teams: list[TeamView]
    groups: list[GroupView]
    memory_cap_gb: float
    jobs: Annotated[list[JobView], says("Live ones.")]
    ended: Annotated[list[JobView], says("The last fifty.")]


class PhaseRun(TypedDict):
    """A phase that runs or ran."""

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
