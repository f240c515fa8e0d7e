"""Which devices decode as which group, and which of them can be freed together."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from rollpacker.core.types import EngineId


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Which devices decode as which group; all groups have the same size.

    Args:
        engines: devices of each.
        node_size: devices of a node: node ``n`` has devices ``n * node_size`` onwards.
        training_replica_devices: devices of a training replica, numbered alike. Gradients need
            all devices of a replica.

    Raises:
        ValueError: a group leaves its node, does not divide it, overlaps or differs in size.
    """

    engines: Mapping[EngineId, tuple[int, ...]]
    node_size: int
    training_replica_devices: int

    def __post_init__(self) -> None:
        sizes = {len(devices) for devices in self.engines.values()}
        if len(sizes) != 1 or self.node_size % next(iter(sizes)):
            raise ValueError(
                f"tensor-parallel groups must have one size that divides a node of "
                f"{self.node_size} devices, got sizes {sorted(sizes)}"
            )
        for engine, devices in self.engines.items():
            if len({device // self.node_size for device in devices}) > 1:
                raise ValueError(f"engine {engine} spans nodes: its devices are {devices}")
        if len(set(self.devices)) != len(self.devices):
            raise ValueError("two engines share a device")
        if self.training_replica_devices < 1:
            raise ValueError("training_replica_devices must be at least 1")

    @property
    def tp(self) -> int:
        """Devices of each group."""
        return len(next(iter(self.engines.values())))

    @property
    def devices(self) -> tuple[int, ...]:
        """All devices, ascending."""
        return tuple(sorted(device for group in self.engines.values() for device in group))

    def replica(self, device: int) -> int:
        """The training replica that a device belongs to."""
        return device // self.training_replica_devices

    def trainable(self, devices: Collection[int]) -> tuple[int, ...]:
        """Those of ``devices`` whose whole training replica is among them, ascending."""
        count: dict[int, int] = {}
        for device in devices:
            count[self.replica(device)] = count.get(self.replica(device), 0) + 1
        whole = {one for one, n in count.items() if n == self.training_replica_devices}
        return tuple(sorted(device for device in devices if self.replica(device) in whole))

    def units(self) -> list[tuple[EngineId, ...]]:
        """Smallest sets of engines that share no training replica with another set."""
        found: list[tuple[set[int], list[EngineId]]] = []
        for engine in sorted(self.engines):
            replicas = {self.replica(device) for device in self.engines[engine]}
            members = [engine]
            for unit in [unit for unit in found if unit[0] & replicas]:
                replicas |= unit[0]
                members.extend(unit[1])
                found.remove(unit)
            found.append((replicas, members))
        return sorted(tuple(sorted(members)) for _, members in found)

    def without(self, engine: EngineId) -> Layout | None:
        """The layout after an engine's death; None if it was the last."""
        left = {one: devices for one, devices in self.engines.items() if one != engine}
        if not left:
            return None
        return Layout(
            engines=left,
            node_size=self.node_size,
            training_replica_devices=self.training_replica_devices,
        )


def cheapest_half(layout: Layout, load: Mapping[EngineId, int]) -> tuple[EngineId, ...] | None:
    """Engines with exactly half of the devices, in whole groups and whole training replicas.

    Of all such halves, one with the least ``load`` to move, later engines first. None where
    there is none.
    """
    half, odd = divmod(len(layout.devices), 2)
    if odd:
        return None
    best: dict[int, tuple[int, tuple[EngineId, ...]]] = {0: (0, ())}
    for unit in reversed(layout.units()):
        devices = [device for engine in unit for device in layout.engines[engine]]
        if layout.trainable(devices) != tuple(sorted(devices)):
            continue
        cost = sum(load[engine] for engine in unit)
        for size, (paid, chosen) in sorted(best.items(), reverse=True):
            total, price = size + len(devices), paid + cost
            if total <= half and (total not in best or price < best[total][0]):
                best[total] = (price, (*chosen, *unit))
    return tuple(sorted(best[half][1])) if half in best else None
