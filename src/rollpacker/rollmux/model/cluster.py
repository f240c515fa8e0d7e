"""The state of the cluster: live jobs, groups, nodes and pinned memory."""

from __future__ import annotations

from dataclasses import dataclass, field

from rollpacker.rollmux.model.inventory import Inventory, Needs
from rollpacker.rollmux.model.jobs import JobSpec, Observed
from rollpacker.rollmux.model.seat import POOLS, ROLLOUT, Seat, SeatState

HORIZON = 16  # iterations planned for a job of unknown length


@dataclass(slots=True)
class PoolNode:
    """A node that a group holds, with the GB of host memory reserved by each job."""

    name: str
    pool: int
    group: int
    held: bool = False
    pins: dict[str, float] = field(default_factory=dict)

    @property
    def used_gb(self) -> float:
        return sum(self.pins.values())


@dataclass(slots=True)
class Home:
    """The group of a job, and its nodes of each pool."""

    group: int
    nodes: tuple[tuple[str, ...], tuple[str, ...]]

    @property
    def names(self) -> tuple[str, ...]:
        return self.nodes[0] + self.nodes[1]


@dataclass(slots=True, eq=False)
class Job:
    """A live job. Times are seconds.

    Args:
        started: start of the SLO, moved on by the time for which the job's clock stood still.
        waits_since: start of the wait for nodes (None while the job has nodes or is getting some).
        stopped_at: while the clock stands still, the time up to which ``started`` was moved on.
        admitted_at: when it last got nodes (-1 for never).
        leaves: whether it gives up its nodes at its next iteration boundary.
        urgent: whether its SLO needs nodes of its own, and none were free.
        solo_s: seconds alone of the finished iterations.
        rollout_s: rollout seconds of the running iteration.
        destination, next_seat: reserved for its next iteration boundary.
        going: whether its state is being loaded at its destination, since ``went_at``.
        asked: whether it asked for its next rollout during a move.
        token: token of its permit (-1 for none).
        tail_reached: whether about 80% of the responses of its running rollout are done.
        leaves_tails: whether it ever reported a tail. Plans then count on tails.
        programs: for each pool, whether agents start its programs there.
        stranded: whether it waits because one of its nodes failed.
    """

    spec: JobSpec
    started: float
    submitted: float = 0.0
    waits_since: float | None = None
    stopped_at: float | None = None
    admitted_at: float = -1.0
    leaves: bool = False
    urgent: bool = False
    looked_at: float = 0.0
    observed: Observed = field(default_factory=Observed)
    done: int = 0
    solo_s: float = 0.0
    rollout_s: float = 0.0
    home: Home | None = None
    seat: Seat | None = None
    destination: Home | None = None
    next_seat: Seat | None = None
    going: bool = False
    went_at: float = 0.0
    asked: bool = False
    token: int = -1
    tail_reached: bool = False
    leaves_tails: bool = False
    programs: tuple[bool, bool] = (False, False)
    held: bool = False
    stranded: bool = False

    @property
    def admitted(self) -> bool:
        return self.admitted_at >= 0.0

    @property
    def over(self) -> bool:
        return self.spec.iterations is not None and self.done >= self.spec.iterations

    def wait(self, now: float, *, clock_runs: bool) -> None:
        self.waits_since = now
        self.stopped_at = None if clock_runs else now
        self.leaves = False

    def hold(self, held: bool, now: float) -> None:
        """Hold or release. Held time without nodes counts neither for the SLO nor as patience."""
        if self.waits_since is not None and self.held and not held:
            self.waits_since = now
            if self.stranded:
                self.run_clock(now)
                self.stopped_at = None
        self.held = self.leaves = held
        if self.waits_since is not None and self.stranded and held and self.stopped_at is None:
            self.stopped_at = now

    def run_clock(self, now: float) -> None:
        """Take the time for which the clock stood still out of the SLO."""
        if self.stopped_at is not None:
            self.started += now - self.stopped_at
            self.stopped_at = now

    def admit(self, now: float) -> None:
        self.run_clock(now)
        self.waits_since = self.stopped_at = None
        self.stranded = False
        self.admitted_at = now

    def memory_gb(self, pool: int) -> float:
        return self.spec.rollout_memory_gb if pool == ROLLOUT else self.spec.train_memory_gb

    def needs(self, pool: int) -> Needs:
        return Needs(
            memory_gb=self.memory_gb(pool),
            devices=self.spec.node_devices,
            labels=self.spec.rollout_labels if pool == ROLLOUT else self.spec.train_labels,
            programs=self.programs[pool],
        )

    def remaining(self) -> int:
        """Iterations to plan for: at most ``HORIZON`` if the number is uncertain."""
        left = self.spec.left(self.done)
        if left is None:
            return HORIZON
        # A job that may stop at once must not spend the slack of iterations that never come.
        return min(left, HORIZON) if self.spec.iterations is None else max(left, 1)


@dataclass(slots=True, eq=False)
class CoExecutionGroup:
    """Jobs that share nodes. ``epoch`` grows with every change, and ``bits`` are for masks of
    gangs."""

    id: int
    epoch: int = 0
    seats: list[Seat] = field(default_factory=list)
    nodes: tuple[list[str], list[str]] = field(default_factory=lambda: ([], []))
    bits: dict[str, int] = field(default_factory=dict)

    def in_order(self) -> list[Seat]:
        """Renumber the members that are here. The one furthest in its iteration comes first."""
        found = [seat for seat in self.seats if seat.state is not SeatState.AWAY]
        found.sort(key=lambda seat: seat.progress)
        for position, seat in enumerate(found):
            seat.order(position)
        return found

    def bit(self, node: str) -> int:
        if node not in self.bits:
            taken = set(self.bits.values())
            bit = 1
            while bit in taken:
                bit <<= 1
            self.bits[node] = bit
        return self.bits[node]

    def mask(self, nodes: tuple[str, ...]) -> int:
        return sum(self.bit(node) for node in nodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """Nodes that the first job in the queue counts on. Others may use them until it starts.

    Args:
        at: when the job is expected to start.
        nodes: nodes in use now, sorted so that a restored scheduler is written as it was.
        fresh: free nodes of each pool.
    """

    job: str
    at: float
    nodes: tuple[str, ...]
    fresh: tuple[int, int]


class Cluster:
    """Jobs, groups and nodes. Only its methods pin and unpin."""

    def __init__(self, inventory: Inventory) -> None:
        self.inventory = inventory
        self.reservation: Reservation | None = None
        self.jobs: dict[str, Job] = {}
        self.groups: dict[int, CoExecutionGroup] = {}
        self.nodes: dict[str, PoolNode] = {}
        self.number = 0  # number of the next group
        self.changed: set[int] = set()  # groups whose summary is stale

    def new_group(self) -> CoExecutionGroup:
        group = CoExecutionGroup(self.number)
        self.number += 1
        self.groups[group.id] = group
        return group

    def new_nodes(
        self, group: CoExecutionGroup, pool: int, count: int, needs: Needs
    ) -> tuple[str, ...]:
        """Take free nodes from the inventory. A caller sets ``held`` when it acquires them."""
        names = self.inventory.take(pool, count, needs) if count else ()
        for name in names:
            self.nodes[name] = PoolNode(name, pool, group.id)
            group.nodes[pool].append(name)
            group.bit(name)
        return names

    def pin(self, job: Job, home: Home) -> None:
        for pool in POOLS:
            gb = job.memory_gb(pool)
            for name in home.nodes[pool]:
                self.nodes[name].pins[job.spec.id] = gb
        self.changed.add(home.group)

    def unpin(self, job: Job, home: Home, keep: Home | None = None) -> list[str]:
        """Free a job's memory, except on nodes of ``keep``.

        Drops nodes without pins and groups without nodes. Returns the dropped nodes that were held.
        """
        freed: list[str] = []
        for pool in POOLS:
            kept = keep.nodes[pool] if keep else ()
            for name in home.nodes[pool]:
                node = self.nodes.get(name)
                if node is None or name in kept:
                    continue
                node.pins.pop(job.spec.id, None)
                if not node.pins:
                    if node.held:
                        freed.append(name)
                    self.drop(node)
        self.changed.add(home.group)
        if not any(self.groups[home.group].nodes):
            del self.groups[home.group]
        return freed

    def drop(self, node: PoolNode) -> None:
        group = self.groups[node.group]
        group.nodes[node.pool].remove(node.name)
        del group.bits[node.name]
        del self.nodes[node.name]
        self.inventory.give([node.name])

    def members(self, group: CoExecutionGroup) -> list[Job]:
        return [self.jobs[seat.job] for seat in group.seats]
