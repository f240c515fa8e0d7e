"""The engines and training replicas of a job's devices, and which of them can be freed."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Literal

from rollpacker.core.types import Device, EngineId, ReplicaId

Layout = Literal["colocated", "separate"]
"""Whether engines and replicas cover the same devices, or have their own."""

TAIL_ENGINES = 0.25  # share of the engines that decode a tail


def tail_engines(engines: int) -> int:
    """Engines that a tail keeps. 0 if that frees none."""
    kept = math.ceil(TAIL_ENGINES * engines)
    return kept if kept < engines else 0


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """Engines and replicas by the devices that they cover. Engines on a replica's devices may be
    gone. Raises ``ValueError`` if an engine spans nodes, two of a kind share a device, or a
    separate engine and replica do."""

    layout: Layout
    engines: Mapping[EngineId, tuple[Device, ...]]
    replicas: Mapping[ReplicaId, tuple[Device, ...]]

    def __post_init__(self) -> None:
        for engine, devices in self.engines.items():
            if len({device.node for device in devices}) != 1:
                raise ValueError(f"engine {engine} must be on one node, its devices are {devices}")
        decoding, training = _all(self.engines.values()), _all(self.replicas.values())
        if self.layout == "separate" and decoding & training:
            shared = min(decoding & training)
            raise ValueError(f"{shared} is in an engine and in a replica: devices are separate")

    @property
    def tp(self) -> int:
        return len(next(iter(self.engines.values())))

    @cached_property
    def devices(self) -> frozenset[Device]:
        return frozenset(chain(*self.engines.values(), *self.replicas.values()))

    @cached_property
    def at(self) -> dict[Device, ReplicaId]:
        return {device: each for each, devices in self.replicas.items() for device in devices}

    @cached_property
    def on(self) -> dict[EngineId, tuple[ReplicaId, ...]]:
        """Replicas on each engine's devices, ascending. None if they are separate."""
        return {
            engine: tuple(sorted({self.at[device] for device in devices if device in self.at}))
            for engine, devices in self.engines.items()
        }

    @cached_property
    def beside(self) -> dict[ReplicaId, tuple[EngineId, ...]]:
        """Engines on each replica's devices, ascending. None if they are separate."""
        found: dict[ReplicaId, list[EngineId]] = {replica: [] for replica in self.replicas}
        for engine in sorted(self.engines):
            for replica in self.on[engine]:
                found[replica].append(engine)
        return {replica: tuple(engines) for replica, engines in found.items()}

    def trainable(self, decoding: Collection[Device]) -> tuple[ReplicaId, ...]:
        """Replicas that can compute gradients while these devices decode, ascending."""
        busy = {self.at[device] for device in decoding if device in self.at}
        return tuple(sorted(self.replicas.keys() - busy))

    def units(self) -> list[tuple[EngineId, ...]]:
        """Smallest sets of engines that share no training replica with another set."""
        found: list[tuple[set[ReplicaId], list[EngineId]]] = []
        for engine in sorted(self.engines):
            replicas, members = set(self.on[engine]), [engine]
            for unit in [unit for unit in found if unit[0] & replicas]:
                replicas |= unit[0]
                members.extend(unit[1])
                found.remove(unit)
            found.append((replicas, members))
        return sorted(tuple(sorted(members)) for _, members in found)

    def without(self, engine: EngineId) -> Fleet | None:
        """The fleet without a dead engine and the replicas on its devices. None if it was the
        last."""
        engines = {one: devices for one, devices in self.engines.items() if one != engine}
        left = self.training(self.replicas.keys() - self.on.get(engine, ()))
        return replace(left, engines=engines) if engines else None

    def training(self, replicas: Collection[ReplicaId]) -> Fleet:
        left = {one: devices for one, devices in self.replicas.items() if one in replicas}
        return replace(self, replicas=left)


def _all(parts: Iterable[tuple[Device, ...]]) -> set[Device]:
    devices = list(chain.from_iterable(parts))
    if len(set(devices)) != len(devices):
        raise ValueError("two engines, or two replicas, share a device")
    return set(devices)


def cheapest_half(fleet: Fleet, load: Mapping[EngineId, int]) -> tuple[EngineId, ...] | None:
    """Engines with exactly half of the devices, all of them of replicas within this half. Chooses
    the half with the least ``load`` to move, later engines first. None if there is no half."""
    half, odd = divmod(len(fleet.devices), 2)
    if odd:
        return None
    best: dict[int, tuple[int, tuple[EngineId, ...]]] = {0: (0, ())}
    for unit in reversed(fleet.units()):
        devices = [device for engine in unit for device in fleet.engines[engine]]
        if not fleet.at.keys() >= set(devices):
            continue
        cost = sum(load[engine] for engine in unit)
        for size, (paid, chosen) in sorted(best.items(), reverse=True):
            total, price = size + len(devices), paid + cost
            if total <= half and (total not in best or price < best[total][0]):
                best[total] = (price, (*chosen, *unit))
    return tuple(sorted(best[half][1])) if half in best else None


def grid(count: int, per_node: int) -> tuple[Device, ...]:
    """``count`` devices, node after node."""
    return tuple(Device(*divmod(number, per_node)) for number in range(count))


def colocated(devices: Sequence[Device], *, tensor_parallel: int, replica: int) -> Fleet:
    """Engines of ``tensor_parallel`` and replicas of ``replica`` neighbouring devices. A replica
    has the number of its first engine. Raises ``ValueError`` if sizes do not divide."""
    if replica % tensor_parallel:
        raise ValueError(
            f"a replica of {replica} devices holds no whole engines of {tensor_parallel}"
        )
    return Fleet(
        layout="colocated",
        engines={EngineId(n): part for n, part in enumerate(_cut(devices, tensor_parallel))},
        replicas={
            ReplicaId(n * (replica // tensor_parallel)): part
            for n, part in enumerate(_cut(devices, replica))
        },
    )


def separate(
    rollout: Sequence[Device], training: Sequence[Device], *, tensor_parallel: int, replica: int
) -> Fleet:
    """Engines on the rollout devices and replicas on the training devices. Raises ``ValueError`` if
    sizes do not divide or devices are shared."""
    return Fleet(
        layout="separate",
        engines={EngineId(n): part for n, part in enumerate(_cut(rollout, tensor_parallel))},
        replicas={ReplicaId(n): part for n, part in enumerate(_cut(training, replica))},
    )


def _cut(devices: Sequence[Device], size: int) -> list[tuple[Device, ...]]:
    if size < 1 or not devices or len(devices) % size:
        raise ValueError(f"{len(devices)} devices do not divide into parts of {size}")
    return [tuple(devices[start : start + size]) for start in range(0, len(devices), size)]


def by_number(
    layout: Layout,
    engines: tuple[EngineId, ...],
    replicas: tuple[ReplicaId, ...],
    replica_engines: int = 0,
) -> Fleet:
    """A fleet of these ids, ascending, as if each engine were one device.

    A colocated replica has the number of its first engine, and lies on ``replica_engines`` from
    there (0: those up to the next replica's). If none of them is left, it is on its own device.
    """
    own: dict[ReplicaId, tuple[Device, ...]] = {one: (Device(1, one),) for one in replicas}
    if layout == "colocated":
        ends: tuple[int, ...] = (*replicas[1:], max(engines, default=0) + 1)
        if replica_engines:
            ends = tuple(replica + replica_engines for replica in replicas)
        for replica, end in zip(replicas, ends, strict=False):
            live = engines[bisect_left(engines, replica) : bisect_left(engines, end)]
            own[replica] = tuple(Device(0, one) for one in live) or (Device(0, replica),)
    return Fleet(layout=layout, engines={one: (Device(0, one),) for one in engines}, replicas=own)
