"""The state of the cluster: live jobs, groups, nodes and who is pinned on them."""

from __future__ import annotations

from dataclasses import dataclass, field

from rollpacker.rollmux import interleave as il
from rollpacker.rollmux.interleave import Seat
from rollpacker.rollmux.jobs import JobSpec, Observed

POOLS = (il.ROLLOUT, il.TRAIN)
HORIZON = 16
"""Iterations that a job of unknown length is planned for."""


@dataclass(slots=True)
class Node:
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


class Job:
    """A live job."""

    __slots__ = (
        "asked",
        "done",
        "going",
        "home",
        "leaving",
        "looked_at",
        "next_seat",
        "observed",
        "rollout_s",
        "seat",
        "solo_s",
        "spec",
        "started",
        "tail_reached",
        "token",
    )

    def __init__(self, spec: JobSpec, now: float) -> None:
        self.spec = spec
        self.started = now
        self.observed = Observed()
        self.done = 0
        self.solo_s = 0.0
        """Seconds alone of the finished iterations."""
        self.rollout_s = 0.0
        """Of the iteration that is running."""
        self.home: Home | None = None
        self.seat: Seat | None = None
        self.leaving: Home | None = None
        """Reserved: where it goes at its next iteration boundary."""
        self.next_seat: Seat | None = None
        self.going = False
        """Whether its state is being loaded on ``leaving``."""
        self.asked = False
        """Whether it asked for its next rollout while it was being moved."""
        self.token = -1
        """Of the permit it holds; -1 for none."""
        self.tail_reached = False
        self.looked_at = now
        """By repacking."""

    def gangs(self) -> tuple[int, int]:
        """Nodes of either pool that it asks for."""
        return self.spec.rollout_nodes, self.spec.train_nodes

    def memory_gb(self, pool: int, nodes: int) -> float:
        """Host memory on each of so many nodes of a pool."""
        if pool == il.ROLLOUT:
            return self.spec.rollout_memory_gb
        return self.spec.train_memory_gb * self.spec.train_nodes / nodes

    def remaining(self) -> int:
        """Iterations to go; ``HORIZON`` where nobody knows."""
        if self.spec.iterations is None:
            return HORIZON
        return max(self.spec.iterations - self.done, 1)


class Group:
    """Jobs that share nodes: their seats by position, and its nodes as bits."""

    __slots__ = ("bits", "epoch", "id", "last", "nodes", "seats")

    def __init__(self, number: int) -> None:
        self.id = number
        self.epoch = 0
        self.seats: list[Seat] = []
        self.nodes: tuple[list[str], list[str]] = ([], [])
        self.bits: dict[str, int] = {}
        self.last = [(0, -1), (0, -1)]
        """Round and position of the last permit of either pool."""

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


class Cluster:
    """Jobs, groups and nodes, and the only functions that pin and unpin."""

    def __init__(self) -> None:
        self.jobs: dict[str, Job] = {}
        self.groups: dict[int, Group] = {}
        self.nodes: dict[str, Node] = {}
        self.numbers = [0, 0, 0]
        """Nodes of either pool and groups that ever were."""
        self.changed: set[int] = set()
        """Groups whose summary is stale."""

    def new_group(self) -> Group:
        """An empty group."""
        group = Group(self.numbers[2])
        self.numbers[2] += 1
        self.groups[group.id] = group
        return group

    def new_nodes(self, group: Group, pool: int, count: int) -> tuple[str, ...]:
        """Nodes that the provider has not been asked for yet."""
        made: list[str] = []
        for _ in range(count):
            name = f"{'rt'[pool]}{self.numbers[pool]}"
            self.numbers[pool] += 1
            self.nodes[name] = Node(name, pool, group.id)
            group.nodes[pool].append(name)
            group.bit(name)
            made.append(name)
        return tuple(made)

    def pin(self, job: Job, home: Home) -> None:
        """Reserve a job's memory on nodes."""
        for pool in POOLS:
            gb = job.memory_gb(pool, len(home.nodes[pool]))
            for name in home.nodes[pool]:
                self.nodes[name].pins[job.spec.id] = gb
        self.changed.add(home.group)

    def unpin(self, job: Job, home: Home, keep: Home | None = None) -> list[str]:
        """Free a job's memory, but not on nodes that ``keep`` has too.

        Nodes that nobody is pinned on are dropped, and returned where they were held.
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
        self.drop_if_empty(home.group)
        return freed

    def drop_if_empty(self, number: int) -> None:
        """Forget a group without nodes."""
        group = self.groups[number]
        if not group.nodes[0] and not group.nodes[1]:
            del self.groups[group.id]

    def drop(self, node: Node) -> None:
        """Forget a node."""
        group = self.groups[node.group]
        group.nodes[node.pool].remove(node.name)
        del group.bits[node.name]
        del self.nodes[node.name]

    def members(self, group: Group) -> list[Job]:
        """Jobs with a seat in the group."""
        return [self.jobs[seat.job] for seat in group.seats]
