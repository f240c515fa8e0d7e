"""The nodes: rented from a cloud up to a limit, or named machines of an owner."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Annotated, Any, Final, Literal

from rollpacker.core.codec import load, says
from rollpacker.core.types import Phase

POOL_NAMES: Final[tuple[Phase, Phase]] = ("rollout", "train")
NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")  # form of the names of jobs and nodes
Labels = Mapping[str, str]
Status = Literal["open", "cordoned", "draining", "set_aside", "down"]
"""Status of a node. ``set_aside``: it failed too often, or differs from its description."""

Agent = Literal["", "heard", "programs"]
"""Last report about a node's agent: none, one, or one that starts programs."""

FLAPS: Final = 3
"""A node that returns after so many failures within ``FLAPPING_S`` seconds is set aside."""
FLAPPING_S: Final = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Requirements for every node of a gang. ``programs`` needs an agent that starts programs."""

    memory_gb: float
    devices: int = 1
    labels: Labels = field(default_factory=dict[str, str])
    programs: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A node by name, as its owner or its agent describes it."""

    name: str
    pool: Annotated[Phase, says("the phase that runs there.")]
    memory_gb: Annotated[float, says("host memory for the states of jobs.")] = 1536.0
    devices: Annotated[int, says("GPUs.")] = 8
    rack: Annotated[str, says("rack or island. A gang comes from a single one if possible.")] = ""
    labels: Annotated[Labels, says("labels that jobs may require.")] = field(
        default_factory=dict[str, str]
    )

    def __post_init__(self) -> None:
        """Raises ``ValueError`` on a bad field."""
        if not self.name:
            raise ValueError("node: name must not be empty")
        if self.pool not in POOL_NAMES:
            raise ValueError(f"node {self.name}: pool is rollout or train, got {self.pool!r}")
        if not 0 < self.memory_gb < inf or self.devices < 1:
            raise ValueError(f"node {self.name}: memory_gb and devices must be positive")

    def suits(self, needs: Needs) -> bool:
        """Whether it would do if nothing ran on it."""
        return (
            needs.memory_gb <= self.memory_gb
            and needs.devices <= self.devices
            and all(self.labels.get(key) == value for key, value in needs.labels.items())
        )


def count_pools(machines: Iterable[Machine]) -> tuple[int, int]:
    """Number of machines of each pool."""
    pools = [machine.pool for machine in machines]
    return pools.count("rollout"), pools.count("train")


class Inventory(ABC):
    """Nodes of both pools. ``pool`` is 0 for rollout and 1 for training."""

    @abstractmethod
    def free(self, pool: int, needs: Needs) -> float:
        """Number of nodes that can be taken now (infinite without a limit)."""

    def usable(self, pool: int, needs: Needs) -> float:
        """Number of nodes that could be taken now if nothing ran."""
        return self.ever(pool, needs)

    @abstractmethod
    def ever(self, pool: int, needs: Needs) -> float:
        """Number of suitable nodes if nothing ran and all nodes were open."""

    @abstractmethod
    def take(self, pool: int, count: int, needs: Needs) -> tuple[str, ...]:
        """Take ``count`` free nodes. Raises ``ValueError`` if there are fewer."""

    @abstractmethod
    def give(self, names: Iterable[str]) -> None:
        """Return unused nodes."""

    @abstractmethod
    def untake(self, names: Iterable[str]) -> None:
        """Undo the last ``take``. The next one returns the same nodes."""

    @abstractmethod
    def takes(self, name: str, needs: Needs) -> bool:
        """Whether a job may join others on a node, apart from memory."""

    @abstractmethod
    def memory_gb(self, name: str) -> float:
        """Host memory of a node."""

    @abstractmethod
    def fail(self, name: str, now: float, why: str) -> None:
        """A node is lost."""

    @property
    def machines(self) -> tuple[Machine, ...]:
        """Nodes with names of their own."""
        return ()

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """The state that later answers depend on: plain values, or slots, which are shared."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore ``state_dict``."""


class Cloud(Inventory):
    """Nodes rented from a provider under our own names, alike in each pool.

    Args:
        limit: most nodes of each pool at once (None for any number).
    """

    def __init__(
        self, memory_gb: float, limit: tuple[int | None, int | None] = (None, None)
    ) -> None:
        self._machine = Machine(name="cloud", pool="rollout", memory_gb=memory_gb)
        self._limit = tuple(inf if most is None else most for most in limit)
        self._made = [0, 0]
        self._used: set[str] = set()

    def free(self, pool: int, needs: Needs) -> float:
        if not self._machine.suits(needs):
            return 0
        used = 0
        if self._limit[pool] < inf:
            used = sum(name[0] == "rt"[pool] for name in self._used)
        return self._limit[pool] - used

    def ever(self, pool: int, needs: Needs) -> float:
        return self._limit[pool] if self._machine.suits(needs) else 0

    def take(self, pool: int, count: int, needs: Needs) -> tuple[str, ...]:
        """New names: r0, r1, ... for rollout nodes, t0, t1, ... for training nodes."""
        if self.free(pool, needs) < count:
            raise ValueError(f"no {count} {POOL_NAMES[pool]} nodes are free")
        first = self._made[pool]
        self._made[pool] += count
        names = tuple(f"{'rt'[pool]}{first + n}" for n in range(count))
        self._used.update(names)
        return names

    def give(self, names: Iterable[str]) -> None:
        self._used.difference_update(names)

    def untake(self, names: Iterable[str]) -> None:
        for name in sorted(names, key=lambda name: -int(name[1:])):
            self._used.discard(name)
            pool = "rt".index(name[0])
            if int(name[1:]) == self._made[pool] - 1:
                self._made[pool] -= 1

    def takes(self, name: str, needs: Needs) -> bool:
        del name
        return self._machine.suits(needs)

    def memory_gb(self, name: str) -> float:
        del name
        return self._machine.memory_gb

    def fail(self, name: str, now: float, why: str) -> None:
        del now, why
        self._used.discard(name)

    def state_dict(self) -> dict[str, Any]:
        return {"made": list(self._made), "used": sorted(self._used)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._made[:] = state["made"]
        self._used = set(state["used"])


@dataclass(slots=True)
class Slot:
    """A machine and its status.

    Args:
        used: whether a group has it.
        failures: times of recent failures.
        closed: status and why that a node gets back when it is not down any more.
        since: last change of the status (None for never).
    """

    machine: Machine
    status: Status = "open"
    used: bool = False
    why: str = ""
    failures: list[float] = field(default_factory=list[float])
    closed: tuple[Status, str] = ("open", "")
    agent: Agent = ""
    since: float | None = None

    def become(self, status: Status, why: str, now: float) -> None:
        if status != self.status:
            self.since = now
        self.status, self.why = status, why

    def takes(self, needs: Needs) -> bool:
        return self.status == "open" and (self.agent == "programs" or not needs.programs)


_Wanted = tuple[int, float, int, tuple[tuple[str, str], ...], bool]


def _wanted(pool: int, needs: Needs) -> _Wanted:
    labels = tuple(needs.labels.items())
    return pool, needs.memory_gb, needs.devices, labels, needs.programs


class Fixed(Inventory):
    """Named machines. Open and unused ones can be taken."""

    def __init__(self, machines: Iterable[Machine] = ()) -> None:
        self.slots: dict[str, Slot] = {}
        for machine in machines:
            if machine.name in self.slots:
                raise ValueError(f"node {machine.name}: listed twice")
            self.slots[machine.name] = Slot(machine)
        # Waiting jobs repeat the same questions, so these answers stay until something changes.
        self._suits: dict[_Wanted, list[Slot]] = {}
        self._free: dict[_Wanted, int] = {}
        self._usable: dict[_Wanted, int] = {}

    @property
    def machines(self) -> tuple[Machine, ...]:
        return tuple(slot.machine for slot in self.slots.values())

    def _suitable(self, pool: int, needs: Needs) -> list[Slot]:
        wanted = _wanted(pool, needs)
        if wanted not in self._suits:
            self._suits[wanted] = [
                slot
                for slot in self.slots.values()
                if slot.machine.pool == POOL_NAMES[pool] and slot.machine.suits(needs)
            ]
        return self._suits[wanted]

    def _changed(self, machines: bool = False) -> None:
        self._free.clear()
        self._usable.clear()
        if machines:
            self._suits.clear()

    def free(self, pool: int, needs: Needs) -> float:
        wanted = _wanted(pool, needs)
        if wanted not in self._free:
            suitable = self._suitable(pool, needs)
            self._free[wanted] = sum(s.takes(needs) and not s.used for s in suitable)
        return self._free[wanted]

    def usable(self, pool: int, needs: Needs) -> float:
        wanted = _wanted(pool, needs)
        if wanted not in self._usable:
            self._usable[wanted] = sum(s.takes(needs) for s in self._suitable(pool, needs))
        return self._usable[wanted]

    def ever(self, pool: int, needs: Needs) -> float:
        """Also counts nodes that are down or closed, since they may return."""
        return len(self._suitable(pool, needs))

    def take(self, pool: int, count: int, needs: Needs) -> tuple[str, ...]:
        """Prefer one rack: the one with the fewest free nodes that has enough. Else take most
        first."""
        racks: dict[str, list[Slot]] = {}
        for slot in self._suitable(pool, needs):
            if slot.takes(needs) and not slot.used:
                racks.setdefault(slot.machine.rack, []).append(slot)
        enough = [rack for rack, slots in racks.items() if len(slots) >= count]
        order = sorted(racks, key=lambda rack: (-len(racks[rack]), rack))
        if enough:
            order = [min(enough, key=lambda rack: (len(racks[rack]), rack))]
        chosen = [slot for rack in order for slot in _plainest_first(racks[rack])][:count]
        if len(chosen) < count:
            raise ValueError(f"no {count} {POOL_NAMES[pool]} nodes are free")
        for slot in chosen:
            slot.used = True
        self._changed()
        return tuple(slot.machine.name for slot in chosen)

    def give(self, names: Iterable[str]) -> None:
        for name in names:
            if name in self.slots:
                self.slots[name].used = False
        self._changed()

    def untake(self, names: Iterable[str]) -> None:
        self.give(names)

    def takes(self, name: str, needs: Needs) -> bool:
        slot = self.slots[name]
        return slot.takes(needs) and slot.machine.suits(needs)

    def memory_gb(self, name: str) -> float:
        return self.slots[name].machine.memory_gb

    def fail(self, name: str, now: float, why: str) -> None:
        slot = self.slots[name]
        slot.failures = [at for at in slot.failures if at > now - FLAPPING_S] + [now]
        if slot.status != "down":
            slot.closed = slot.status, slot.why
        slot.become("down", why or "failed", now)
        slot.used = False
        self._changed()

    def join(self, machine: Machine, now: float) -> Slot:
        """Add a machine, or bring one back. A node that users closed stays closed.

        Raises ``ValueError`` on a new pool for a node in use.
        """
        slot = self.slots.get(machine.name)
        self._changed(machines=True)
        if slot is None:
            slot = self.slots[machine.name] = Slot(machine)
            return slot
        if slot.machine.pool != machine.pool and slot.used:
            raise ValueError(f"node {machine.name}: a node in use cannot change its pool")
        slot.machine = machine
        if slot.status == "down":
            recent = [at for at in slot.failures if at > now - FLAPPING_S]
            status, why = slot.closed
            if len(recent) >= FLAPS and status == "open":
                status, why = "set_aside", f"failed {len(recent)} times within an hour"
            slot.become(status, why, now)
        return slot

    def hear(self, name: str, agent: Agent) -> None:
        """A node's agent reports. Raises ``KeyError`` for an unknown node."""
        self.slots[name].agent = agent
        self._changed()

    def close(self, name: str, status: Status, why: str, now: float) -> None:
        """Take nothing new on a node. Raises ``KeyError`` for an unknown node."""
        slot = self.slots[name]
        if slot.status == "down":
            slot.closed = status, why
        else:
            slot.become(status, why, now)
        self._changed()

    def open(self, name: str, now: float) -> None:
        """Use a node again, and forget its failures. Raises ``KeyError`` for an unknown node."""
        slot = self.slots[name]
        slot.become("open", "", now)
        slot.failures = []
        self._changed()

    def remove(self, name: str) -> None:
        """Remove a node. Raises ``ValueError`` if it is used, ``KeyError`` if it is unknown."""
        if self.slots[name].used:
            raise ValueError(f"node {name}: jobs are on it, so drain it first")
        del self.slots[name]
        self._changed(machines=True)

    def state_dict(self) -> dict[str, Any]:
        return {"slots": [*self.slots.values()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        slots = load(state["slots"], list[Slot])
        self.slots = {slot.machine.name: slot for slot in slots}
        self._changed(machines=True)


def _plainest_first(slots: Iterable[Slot]) -> list[Slot]:
    """Nodes with an agent first, then those with the fewest labels, memory and devices."""
    return sorted(
        slots,
        key=lambda slot: (
            not slot.agent,
            len(slot.machine.labels),
            slot.machine.memory_gb,
            slot.machine.devices,
            slot.machine.name,
        ),
    )
