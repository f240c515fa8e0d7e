"""Which engines and training replicas a job's devices make."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

from rollpacker.core.types import Device, EngineId, ReplicaId


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Engines and replicas by the devices that they cover.

    Args:
        layout: ``colocated``: engines and replicas cover the same devices, which decode or compute
            gradients; ``separate``: each have their own, and replicas may begin with the first
            complete group.
        engines: devices of each engine, on one node.
        replicas: devices of each replica.

    Raises ``ValueError`` when an engine leaves its node, two of a kind share a device, or the
    devices of the two kinds are not those of the layout.
    """

    layout: Literal["colocated", "separate"]
    engines: Mapping[EngineId, tuple[Device, ...]]
    replicas: Mapping[ReplicaId, tuple[Device, ...]]

    def __post_init__(self) -> None:
        for engine, devices in self.engines.items():
            if len({device.node for device in devices}) != 1:
                raise ValueError(f"engine {engine} must be on one node, its devices are {devices}")
        decoding, training = _all(self.engines.values()), _all(self.replicas.values())
        if self.layout == "colocated" and decoding != training:
            raise ValueError("colocated engines and replicas must cover the same devices")
        if self.layout == "separate" and decoding & training:
            shared = min(decoding & training)
            raise ValueError(f"{shared} is of an engine and of a replica: devices are separate")

    def beside(self, replica: ReplicaId) -> tuple[EngineId, ...]:
        """Engines on the replica's devices, ascending; none where they are separate."""
        own = set(self.replicas[replica])
        return tuple(sorted(e for e, devices in self.engines.items() if own & set(devices)))

    def trainable(self, decoding: Collection[EngineId]) -> tuple[ReplicaId, ...]:
        """Replicas that can compute gradients while these engines decode, ascending."""
        busy = set(decoding)
        return tuple(sorted(each for each in self.replicas if busy.isdisjoint(self.beside(each))))

    def without(self, lost: Device) -> Fleet:
        """What is left when a device fails: its engine and its replica go, and what they share.

        A colocated device that is left without an engine or a replica is of no use, so whoever
        has it goes too.
        """
        engines = {e: d for e, d in self.engines.items() if lost not in d}
        replicas = {r: d for r, d in self.replicas.items() if lost not in d}
        while self.layout == "colocated" and _all(engines.values()) != _all(replicas.values()):
            left = _all(engines.values()) & _all(replicas.values())
            engines = {e: d for e, d in engines.items() if left.issuperset(d)}
            replicas = {r: d for r, d in replicas.items() if left.issuperset(d)}
        return Fleet(layout=self.layout, engines=engines, replicas=replicas)


def _all(parts: Iterable[tuple[Device, ...]]) -> set[Device]:
    devices = list(chain.from_iterable(parts))
    if len(set(devices)) != len(devices):
        raise ValueError("two engines, or two replicas, share a device")
    return set(devices)


def grid(nodes: int, per_node: int) -> tuple[Device, ...]:
    """All devices of equal nodes, node after node."""
    return tuple(Device(node, index) for node in range(nodes) for index in range(per_node))


def colocated(devices: Sequence[Device], *, tensor_parallel: int, replica: int) -> Fleet:
    """Engines of ``tensor_parallel`` and replicas of ``replica`` neighbouring devices.

    A replica has the number of its first engine. Raises ``ValueError`` where they do not divide.
    """
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
    """Engines on the rollout devices and replicas on the training devices.

    Raises ``ValueError`` where they do not divide or share a device.
    """
    return Fleet(
        layout="separate",
        engines={EngineId(n): part for n, part in enumerate(_cut(rollout, tensor_parallel))},
        replicas={ReplicaId(n): part for n, part in enumerate(_cut(training, replica))},
    )


def _cut(devices: Sequence[Device], size: int) -> list[tuple[Device, ...]]:
    """Neighbours in parts of one size."""
    if size < 1 or not devices or len(devices) % size:
        raise ValueError(f"{len(devices)} devices do not divide into parts of {size}")
    return [tuple(devices[start : start + size]) for start in range(0, len(devices), size)]
