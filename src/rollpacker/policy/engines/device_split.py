"""Divides a run's devices among engines and training replicas."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import Literal, TypeVar

from rollpacker.config import RunConfig
from rollpacker.policy.engines.hardware import unsplit

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """A division of devices.

    Args:
        training: devices that train, those that decode if both are colocated.
        replica: devices of a training replica.
        sizes: tensor-parallel sizes of engines, each with processes on all decoding devices.
        apart: engines and replicas have separate processes.
    """

    decoding: int
    training: int
    replica: int
    sizes: tuple[int, ...]
    apart: bool

    @property
    def processes(self) -> int:
        return self.training + self.decoding * len(self.sizes) if self.apart else self.decoding


def divide(config: RunConfig, devices: int, heads: int, kv_heads: int, nodes: int = 1) -> Division:
    """The division of devices on ``nodes`` nodes, for a model with these heads. Raises
    ``ValueError`` if they do not divide."""
    seats = [node for node in range(nodes) for _ in range(devices // nodes)]
    decoding, training = split(config, seats)
    per_node = [*Counter(decoding).values()]
    sizes = engine_sizes(config, per_node, heads, kv_heads)
    check_engines(config, per_node)
    return Division(
        decoding=len(decoding),
        training=len(training),
        replica=replica_size(config, len(training)),
        sizes=sizes,
        apart=apart(config),
    )


def apart(config: RunConfig) -> bool:
    """Whether engines and replicas have separate processes. An engine that can share the replica's
    weights also shares its process."""
    return config.devices.layout == "separate" or config.engine.kind == "vllm"


def turns(config: RunConfig, *, gpus: bool) -> Literal["off", "engine", "both"]:
    """The side that leaves a device while the other works on it (``devices.turns``). Engines of a
    planner, and of a job under RollMux, sleep by other means."""
    asked, devices = config.devices.turns, config.devices
    if asked != "auto":
        return asked
    able = config.engine.kind == "vllm" and devices.layout == "colocated" and devices.per_gpu == 1
    alone = config.rollout.planner == "off" and not config.mux.url
    return "engine" if gpus and able and alone else "off"


def split(config: RunConfig, places: Sequence[T]) -> tuple[Sequence[T], Sequence[T]]:
    """Devices that decode, and those that train. Raises ``ValueError``."""
    if config.devices.layout == "colocated":
        return places, places
    training = config.devices.training
    if training >= len(places):
        raise ValueError(
            f"devices.training={training} leaves none of {len(places)} devices to decode: lower it "
            "or raise devices.per_node"
        )
    return places[:-training], places[-training:]


def check_engines(config: RunConfig, decoding: Sequence[int]) -> None:
    """Raise ``ValueError`` unless the decoding devices of each node are whole engines."""
    size = config.engine.tensor_parallel
    _check_shared("engine.tensor_parallel", size, config)
    for devices in decoding:
        if devices % size:
            where = " of a node" if len(decoding) > 1 else ""
            raise ValueError(
                f"engine.tensor_parallel={size}: {devices} devices{where} that decode do not "
                f"divide into engines of {size}: change it or devices.per_node"
            )


def _check_shared(key: str, size: int, config: RunConfig) -> None:
    shared = config.devices.per_gpu
    if size > 1 and shared > 1:
        raise ValueError(
            f"{key}={size}: its processes cannot share a GPU, and devices.per_gpu={shared}: set "
            "one of them to 1"
        )


def replica_size(config: RunConfig, training: int) -> int:
    """Devices of a replica, of which a colocated one holds whole engines. Raises ``ValueError`` if
    they do not divide."""
    size, engine = config.trainer.members(training), config.engine.tensor_parallel
    _check_shared("trainer.shard", size, config)
    if training % size:
        raise ValueError(
            f"trainer.shard={size}: {training} devices do not divide into replicas of {size}: "
            "change it or devices.per_node"
        )
    if config.devices.layout == "colocated" and size % engine:
        raise ValueError(
            f"engine.tensor_parallel={engine}: a replica of {size} devices holds no whole engines "
            f"of {engine}: set trainer.kind=fsdp and trainer.shard={engine}, or a multiple"
        )
    return size


def engine_sizes(
    config: RunConfig, decoding: Sequence[int], heads: int, kv_heads: int
) -> tuple[int, ...]:
    """Tensor-parallel sizes that engines may have, ascending. Only a planner has more than one.
    ``decoding`` are decoding devices by node, as no engine leaves its node. Raises ``ValueError``
    if heads do not divide, or the planner has no choice."""
    size = config.engine.tensor_parallel
    if why := unsplit(heads, kv_heads, size):
        raise ValueError(f"engine.tensor_parallel={size} cannot split this model: {why}")
    if config.rollout.planner == "off":
        return (size,)
    sizes, devices = [size], gcd(*decoding)
    while devices % (2 * sizes[-1]) == 0 and not unsplit(heads, kv_heads, 2 * sizes[-1]):
        sizes.append(2 * sizes[-1])
    if len(sizes) == 1:
        raise ValueError(
            f"rollout.planner={config.rollout.planner} has no choice, as engines of {2 * size} do "
            f"not divide {devices} devices of a node, or {heads} attention heads: set it to 'off'"
        )
    return tuple(sizes)
