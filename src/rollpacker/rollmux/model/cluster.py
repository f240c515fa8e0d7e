"""The state of the cluster: live jobs, groups, nodes and who is pinned on them."""

from __future__ import annotations

from dataclasses import dataclass, field

from rollpacker.rollmux.model.inventory import Inventory, Needs
from rollpacker.rollmux.model.jobs import JobSpec, Observed
from rollpacker.rollmux.model.seat import POOLS, ROLLOUT, Seat, SeatState

HORIZON = 16
"""Iterations that a job of unknown length is planned for."""


@dataclass(slots=True)
class PoolNode:
    """A node of a pool: the group that holds it, and the GB that each job takes of it."""

    name: str
    pool: int
    group: int
    held: bool = False
    pins: dict[str, float] = field(default_factory=dict)

    @property
    def used_gb(self) -> float:
        """Host memory that is taken, reservations included."""
        return sum(self.pins.values())


@dataclass(slots=True)
class Home:
    """Where a job lives: a group, and its nodes of either pool."""

    group: int
    nodes: tuple[tuple[str, ...], tuple[str, ...]]

    @property
    def names(self) -> tuple[str, ...]:
        """Its nodes of both pools."""
        return self.nodes[0] + self.nodes[1]


@dataclass(slots=True, eq=False)
class Job:
    """A live job.

    Args:
        started: since when its promise counts, less the time for which its clock stood still.
        submitted: when it arrived.
        waits_since: when it began to wait for nodes; None while it has some, or will have.
        stopped_at: until when its clock was moved on, while it stands still.
        admitted_at: when it last got nodes; -1 for never.
        leaves: whether it gives up its nodes at its next iteration boundary.
        urgent: whether it needs nodes of its own to keep its promise, and there were none.
        looked_at: when repacking last did.
        solo_s: seconds alone of the finished iterations.
        rollout_s: of the iteration that is running.
        destination: reserved: where it goes at its next iteration boundary.
        next_seat: its seat there.
        going: whether its state is being loaded at its destination.
        went_at: since when, the last time that it was.
        asked: whether it asked for its next rollout while it was being moved.
        token: of the permit it holds; -1 for none.
        tail_reached: whether about 80% of the responses of its running rollout are there.
        leaves_tails: whether it said so of any rollout: plans count on it then.
        programs: of either pool: whether agents start its programs there.
        held: whether somebody has said that it is to have no nodes.
        stranded: whether it waits because a node of it failed.
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
        """Whether it ever had nodes."""
        return self.admitted_at >= 0.0

    @property
    def over(self) -> bool:
        """Whether all its iterations are done: it has only to say so."""
        return self.spec.iterations is not None and self.done >= self.spec.iterations

    def wait(self, now: float, *, clock_runs: bool) -> None:
        """It has no nodes from now on."""
        self.waits_since = now
        self.stopped_at = None if clock_runs else now
        self.leaves = False

    def hold(self, held: bool, now: float) -> None:
        """Time for which it is held and has no nodes does not count, nor does it make patience."""
        if self.waits_since is not None and self.held and not held:
            self.waits_since = now
            if self.stranded:
                self.run_clock(now)
                self.stopped_at = None
        self.held = self.leaves = held
        if self.waits_since is not None and self.stranded and held and self.stopped_at is None:
            self.stopped_at = now

    def run_clock(self, now: float) -> None:
        """Time for which its clock stands still does not count."""
        if self.stopped_at is not None:
            self.started += now - self.stopped_at
            self.stopped_at = now

    def admit(self, now: float) -> None:
        """It has nodes, or some are being loaded for it."""
        self.run_clock(now)
        self.waits_since = self.stopped_at = None
        self.stranded = False
        self.admitted_at = now

    def memory_gb(self, pool: int) -> float:
        """Host memory on each of its nodes of a pool."""
        return self.spec.rollout_memory_gb if pool == ROLLOUT else self.spec.train_memory_gb

    def needs(self, pool: int) -> Needs:
        """What each of its nodes of a pool has to have."""
        return Needs(
            memory_gb=self.memory_gb(pool),
            devices=self.spec.node_devices,
            labels=self.spec.rollout_labels if pool == ROLLOUT else self.spec.train_labels,
            programs=self.programs[pool],
        )

    def remaining(self) -> int:
        """Iterations that plans count on; ``HORIZON`` at most where nobody knows for sure."""
        left = self.spec.left(self.done)
        if left is None:
            return HORIZON
        # One that may stop at once must not have spent slack of iterations that never come.
        return min(left, HORIZON) if self.spec.iterations is None else max(left, 1)


@dataclass(slots=True, eq=False)
class CoExecutionGroup:
    """Jobs that share nodes.

    Args:
        epoch: grows with every change of its members.
        seats: of its members, by position.
        nodes: of either pool.
        bits: of its nodes in the masks of gangs.
    """

    id: int
    epoch: int = 0
    seats: list[Seat] = field(default_factory=list)
    nodes: tuple[list[str], list[str]] = field(default_factory=lambda: ([], []))
    bits: dict[str, int] = field(default_factory=dict)

    def in_order(self) -> list[Seat]:
        """Members that are here; who is furthest in its iteration comes first from now on."""
        found = [seat for seat in self.seats if seat.state is not SeatState.AWAY]
        found.sort(key=lambda seat: seat.progress)
        for position, seat in enumerate(found):
            seat.order(position)
        return found

    def bit(self, node: str) -> int:
        """The bit of a node; the lowest free one for a new node."""
        if node not in self.bits:
            taken = set(self.bits.values())
            bit = 1
            while bit in taken:
                bit <<= 1
            self.bits[node] = bit
        return self.bits[node]

    def mask(self, nodes: tuple[str, ...]) -> int:
        """A gang as a mask."""
        return sum(self.bit(node) for node in nodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """Nodes that the first job in the queue counts on: others may have them until it comes.

    Args:
        job: which.
        at: when it is expected to start.
        nodes: in use now, sorted: a restored scheduler is written as it was.
        fresh: free nodes of either pool.
    """

    job: str
    at: float
    nodes: tuple[str, ...]
    fresh: tuple[int, int]


class Cluster:
    """Jobs, groups and nodes, and the only functions that pin and unpin."""

    def __init__(self, inventory: Inventory) -> None:
        self.inventory = inventory
        self.reservation: Reservation | None = None
        self.jobs: dict[str, Job] = {}
        self.groups: dict[int, CoExecutionGroup] = {}
        self.nodes: dict[str, PoolNode] = {}
        self.number = 0
        """Of the next group."""
        self.changed: set[int] = set()
        """Groups whose summary is stale."""

    def new_group(self) -> CoExecutionGroup:
        group = CoExecutionGroup(self.number)
        self.number += 1
        self.groups[group.id] = group
        return group

    def new_nodes(
        self, group: CoExecutionGroup, pool: int, count: int, needs: Needs
    ) -> tuple[str, ...]:
        """Nodes that nobody has; ``held`` once they were asked for."""
        names = self.inventory.take(pool, count, needs) if count else ()
        for name in names:
            self.nodes[name] = PoolNode(name, pool, group.id)
            group.nodes[pool].append(name)
            group.bit(name)
        return names

    def pin(self, job: Job, home: Home) -> None:
        """Reserve a job's memory on nodes."""
        for pool in POOLS:
            gb = job.memory_gb(pool)
            for name in home.nodes[pool]:
                self.nodes[name].pins[job.spec.id] = gb
        self.changed.add(home.group)

    def unpin(self, job: Job, home: Home, keep: Home | None = None) -> list[str]:
        """Free a job's memory, but not on nodes that ``keep`` has too.

        Nodes that nobody is pinned on are dropped, and returned where they were held; so is a group
        without nodes.
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
        """Jobs with a seat in the group."""
        return [self.jobs[seat.job] for seat in group.seats]
