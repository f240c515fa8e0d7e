"""A run's processes: their devices, their engine and replica, and those that end together."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from rollpacker.config import RunConfig
from rollpacker.core.types import Device, EngineId, Phase, ReplicaId
from rollpacker.engine.base import Span
from rollpacker.policy.engines.device_split import (
    apart,
    check_engines,
    replica_size,
    split,
    turns,
)
from rollpacker.policy.engines.fleet import Fleet, Layout
from rollpacker.runtime.cluster.devices import Place
from rollpacker.runtime.cluster.nodes import Node
from rollpacker.runtime.worker.worker import EnginePart, ReplicaPart, WorkerSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSlot:
    """One process: its device, and its part of an engine, a replica or both."""

    place: Place
    device: Device
    engine: EnginePart | None = None
    replica: ReplicaPart | None = None


_Seat = tuple[Node, int]
"""A node and the number of one of its devices."""
_Engine = tuple[int, EngineId]
"""The number of devices, and the engine's number: that of the first smallest engine on them."""


class Topology:
    """Workers by engine and replica. The first worker of each leads it."""

    def __init__(self, slots: Sequence[ProcessSlot] = ()) -> None:
        self.slots = slots
        engines: dict[_Engine, list[int]] = defaultdict(list)
        replicas: dict[ReplicaId, list[int]] = defaultdict(list)
        for number, slot in enumerate(slots):
            if slot.engine is not None:
                engines[slot.engine.span.size, slot.engine.engine].append(number)
            if slot.replica is not None:
                replicas[slot.replica.replica].append(number)
        self.engines = {key: tuple(part) for key, part in engines.items()}
        self.replicas = {key: tuple(part) for key, part in replicas.items()}
        self.size = min((size for size, _ in self.engines), default=1)
        """Devices of the smallest engines."""

    def engine(self, worker: int) -> EngineId:
        part = self.slots[worker].engine
        assert part is not None
        return part.engine

    def replica(self, worker: int) -> ReplicaId:
        part = self.slots[worker].replica
        assert part is not None
        return part.replica

    def node(self, worker: int) -> int:
        return self.slots[worker].device.node

    def only(self, phase: Phase) -> list[int]:
        """Workers that lead an engine without a replica, or have a replica without an engine."""
        if phase == "rollout":
            leads = {part[0] for part in self.engines.values()}
            return [n for n in sorted(leads) if self.slots[n].replica is None]
        return [n for n, slot in enumerate(self.slots) if slot.engine is None]

    def whole(self, live: Collection[int]) -> tuple[ReplicaId, ...]:
        return tuple(r for r, part in self.replicas.items() if all(w in live for w in part))

    def decoding(self, live: Collection[int]) -> tuple[EngineId, ...]:
        """The smallest engines with all their workers."""
        return tuple(
            engine
            for (size, engine), part in self.engines.items()
            if size == self.size and all(w in live for w in part)
        )

    def covered(self, size: int, engine: EngineId) -> tuple[EngineId, ...]:
        return tuple(EngineId(engine + n) for n in range(size // self.size))

    def fleet(self, layout: Layout, live: Collection[int]) -> Fleet:
        of = [slot.device for slot in self.slots]
        engines = {e: self.engines[self.size, e] for e in self.decoding(live)}
        replicas = {r: self.replicas[r] for r in self.whole(live)}
        return Fleet(
            layout=layout,
            engines={e: tuple(of[worker] for worker in part) for e, part in engines.items()},
            replicas={r: tuple(of[worker] for worker in part) for r, part in replicas.items()},
        )

    def without(
        self, worker: int, formed: Collection[_Engine]
    ) -> tuple[set[int], tuple[EngineId, ...], tuple[ReplicaId, ...]]:
        """Workers, smallest engines and replicas that end with a worker.

        The other ranks of its engine and replica would wait for it for ever, and their state is
        useless alone. Engines of every size on these devices end.

        Args:
            worker: has died.
            formed: larger engines that decode now.
        """
        workers, replicas = {worker}, set[ReplicaId]()
        if self.slots[worker].replica is not None:
            replicas.add(self.replica(worker))
            workers |= {*self.replicas[self.replica(worker)]}
        mine = {key for key, part in self.engines.items() if workers & {*part}}
        engines = {one for key in mine for one in self.covered(*key)}
        for key in formed:
            if engines & {*self.covered(*key)}:
                engines |= {*self.covered(*key)}
        for key, part in self.engines.items():
            if engines & {*self.covered(*key)}:
                workers |= {*part}
        return workers, tuple(sorted(engines)), tuple(sorted(replicas))


def lay_out(
    config: RunConfig,
    nodes: Sequence[Node],
    sizes: Sequence[int],
    store: str = "",
    generation: int = 0,
) -> list[ProcessSlot]:
    """All processes. A process's number is its place in the list.

    Args:
        sizes: tensor-parallel sizes of engines, ascending. Engines of a larger size than the first
            rest until their devices are joined.
        store: address at which processes of several nodes meet.
        generation: keeps the meetings of different generations apart.

    Raises ``ValueError`` if devices do not divide.
    """
    decoding, training = split(config, _seats(nodes))
    check_engines(config, _per_node(decoding))
    shard = replica_size(config, len(training))
    # A colocated replica has the number of its first engine.
    step = sizes[0] if config.devices.layout == "colocated" else shard
    replicas = [
        _slot(seat, replica=ReplicaPart(replica=ReplicaId(start // step), span=span))
        for start, seat, span in _spans(training, shard, f"{generation}-replica", store)
    ]
    if not apart(config):
        return [
            replace(slot, engine=EnginePart(engine=EngineId(n))) for n, slot in enumerate(replicas)
        ]
    # A trainer that leaves its device must find its memory free again.
    leaves = turns(config, gpus=on_gpus(nodes)) == "both"
    engines = [
        _slot(
            seat,
            engine=EnginePart(
                engine=EngineId(start // sizes[0]), span=span, resting=size > sizes[0] or leaves
            ),
        )
        for size in sizes
        for start, seat, span in _spans(decoding, size, f"{generation}-engine-{size}", store)
    ]
    return [*engines, *replicas]


def in_turns(config: RunConfig, slots: Sequence[ProcessSlot]) -> list[set[int]]:
    """Groups of processes that start one after the other. A vLLM engine without a configured KV
    budget measures its GPU's free memory, so no other process may allocate then."""
    everybody = {*range(len(slots))}
    engine = config.engine
    measures = engine.kind == "vllm" and not engine.kv_tokens
    if not measures or all(slot.place[0] == "cpu" for slot in slots):
        return [everybody]
    sizes = {n: slot.engine.span.size if slot.engine else 0 for n, slot in enumerate(slots)}
    return [{n for n in everybody if sizes[n] == size} for size in sorted({*sizes.values()})]


def worker_specs(
    config: RunConfig,
    slots: Sequence[ProcessSlot],
    which: Collection[int],
    *,
    max_length: int,
    total_updates: int,
) -> dict[int, list[WorkerSpec]]:
    """The specifications of some processes, by node."""
    specs: dict[int, list[WorkerSpec]] = defaultdict(list)
    for rank in sorted(which):
        slot = slots[rank]
        spec = WorkerSpec(
            config=config,
            rank=rank,
            cores=slot.place[1],
            device=slot.place[0],
            max_length=max_length,
            total_updates=total_updates,
            engine=slot.engine,
            replica=slot.replica,
        )
        specs[slot.device.node].append(spec)
    return specs


def on_gpus(nodes: Sequence[Node]) -> bool:
    """Whether the nodes' devices are GPUs."""
    return any(device.startswith("cuda") for node in nodes for device, _ in node.places)


def decoding_devices(config: RunConfig, nodes: Sequence[Node]) -> list[int]:
    """The number of decoding devices on each node that has some. Raises ``ValueError``."""
    return _per_node(split(config, _seats(nodes))[0])


def _seats(nodes: Sequence[Node]) -> list[_Seat]:
    return [(node, number) for node in nodes for number in range(len(node.places))]


def _per_node(seats: Sequence[_Seat]) -> list[int]:
    return [*Counter(node.number for node, _ in seats).values()]


def _slot(
    seat: _Seat, engine: EnginePart | None = None, replica: ReplicaPart | None = None
) -> ProcessSlot:
    node, number = seat
    device = Device(node.number, number)
    return ProcessSlot(place=node.places[number], device=device, engine=engine, replica=replica)


def _spans(
    seats: Sequence[_Seat], size: int, kind: str, store: str
) -> Iterator[tuple[int, _Seat, Span]]:
    """Cut devices into neighbours of ``size``. Yields the first number, the device and its span."""
    for number, seat in enumerate(seats[: len(seats) // size * size]):
        start = number - number % size
        node, others = seats[start][0], seats[start : start + size]
        # Libraries name their shared memory by the file's name without its folder.
        name = f"{node.folder.name}-{kind}-{start}"
        within = all(other.number == node.number for other, _ in others)
        meeting = f"{node.folder}/{name}" if within else f"{store}{name}"
        yield start, seat, Span(rank=number % size, size=size, meeting=meeting)
