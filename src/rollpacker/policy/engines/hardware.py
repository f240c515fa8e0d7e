"""What a policy may know of machines whose engines span several devices: an offline profile.

Engines are numbered at the smallest size; neighbours can be put together into one engine of a
larger tensor-parallel size, and a training replica may need the devices of several.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np

from rollpacker.core.types import Device, EngineId, ReplicaId
from rollpacker.policy.engines.fleet import Fleet
from rollpacker.policy.engines.latency import Floats, LatencyCurve
from rollpacker.policy.engines.parallelism import Devices
from rollpacker.policy.engines.scaling import Tokens


@dataclass(frozen=True, kw_only=True)
class EngineProfile:
    """One engine at one tensor-parallel size.

    Args:
        kv_tokens: KV budget.
        latency: seconds of a decode step by batch size (``LatencyCurve``), without context, up to
            the most sequences that it decodes together.
        context_token_s: seconds that each context token adds to a step; 0 where that is unknown.
        prefill_token_s: seconds to prefill a token; 0 where that is unknown.
    """

    kv_tokens: float
    latency: dict[int, float]
    context_token_s: float = 0.0
    prefill_token_s: float = 0.0

    @cached_property
    def _curve(self) -> LatencyCurve:
        return LatencyCurve(self.latency)

    def step_s(self, batch: Floats, context: Floats) -> Floats:
        """Seconds of decode steps of ``batch`` sequences with ``context`` tokens in all.

        More than it decodes together take turns, so their steps take longer in proportion.
        """
        turns = np.maximum(1.0, batch / self._curve.largest)
        return self._curve.within(batch) * turns + self.context_token_s * context

    def decode_s(self, contexts: Tokens, remaining: Tokens) -> float:
        """Seconds to decode sequences by ``remaining`` tokens each, all at once."""
        order = np.argsort(remaining, kind="stable")
        ends = remaining[order]
        steps = np.diff(ends, prepend=0)
        batch = np.arange(ends.size, 0, -1, dtype=np.float64)
        # Sequences that end first leave first: what is left of their contexts, and their growth.
        held = np.cumsum(contexts[order][::-1])[::-1] + batch * (ends - steps / 2.0)
        return float(np.sum(steps * self.step_s(batch, held)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Devices and the engines that they can form.

    Args:
        node_size: devices of a node.
        engine_devices: devices of the smallest engine.
        replica_devices: devices of a training replica.
        device_bytes: memory of a device for weights and KV, in bytes or in what the KV of one
            token takes.
        weight_bytes: all weights, in the same unit.
        heads: attention heads, which a tensor-parallel size must divide.
        profiles: engines by tensor-parallel size, ``engine_devices`` among them.
        train_token_s: device-seconds of gradient per token.
    """

    node_size: int
    engine_devices: int
    replica_devices: int
    device_bytes: float
    weight_bytes: float
    heads: int
    profiles: dict[int, EngineProfile]
    train_token_s: float

    @property
    def sizes(self) -> tuple[int, ...]:
        """Tensor-parallel sizes, ascending."""
        return tuple(sorted(self.profiles))

    def devices(self) -> Devices:
        """What decides which sizes are possible."""
        return Devices(
            node_size=self.node_size,
            device_bytes=self.device_bytes,
            weight_bytes=self.weight_bytes,
            heads=self.heads,
            known=self.sizes,
        )

    def fleet(self, engines: tuple[EngineId, ...], tp: int) -> Fleet:
        """Engines of ``tp`` devices, made of these, and the replicas that lie on them; the lowest
        part of an engine runs it."""
        base, size = self.engine_devices, tp // self.engine_devices
        live = set(engines)
        formed = {
            engine: self._devices(engine * base, tp)
            for engine in engines
            if engine % size == 0 and live.issuperset(range(engine, engine + size))
        }
        covered = set(chain.from_iterable(formed.values()))
        ends = (max(live, default=-1) + 1) * base
        replicas = {
            ReplicaId(start // base): self._devices(start, self.replica_devices)
            for start in range(0, ends, self.replica_devices)
        }
        whole = {each: part for each, part in replicas.items() if covered.issuperset(part)}
        return Fleet(layout="colocated", engines=formed, replicas=whole)

    def _devices(self, start: int, count: int) -> tuple[Device, ...]:
        return tuple(Device(*divmod(n, self.node_size)) for n in range(start, start + count))

    # What the tail's consolidation asks (``TailCost``) -----------------------------------------

    def kv_tokens(self, tp: int) -> float:
        """KV tokens that a group of ``tp`` devices holds."""
        return self.profiles[tp].kv_tokens

    def prefill_seconds(self, tp: int, tokens: int) -> float:
        """Seconds to compute the KV of ``tokens``."""
        return self.profiles[tp].prefill_token_s * tokens

    def decode_seconds(self, tp: int, contexts: Tokens, remaining: Tokens) -> float:
        """Seconds to decode sequences by ``remaining`` tokens each."""
        return self.profiles[tp].decode_s(contexts, remaining)


def measured(
    profiles: Mapping[int, EngineProfile],
    *,
    devices: int,
    node_size: int,
    replica_devices: int | None = None,
    heads: int = 0,
    kv_heads: int = 0,
) -> Hardware:
    """Devices with engines that were measured.

    A gradient token costs three times a prefilled one: a backward pass is two forward passes.

    Args:
        profiles: engines by tensor-parallel size; no other size is possible.
        devices: how many decode.
        node_size: devices of a node.
        replica_devices: devices of a training replica; None where it has devices of its own.
        heads: the model's attention heads; 0 where they do not matter.
        kv_heads: those that keys and values have; 0 where they do not matter.

    Raises ``ValueError`` for sizes that the model or the devices cannot have.
    """
    smallest = min(profiles)
    for size in sorted(profiles):
        problem = unsplit(heads, kv_heads, size)
        if size % smallest:
            problem = f"they are not put together from engines of {smallest}"
        if node_size % size or devices % size:
            problem = f"they do not divide {devices} devices in nodes of {node_size}"
        if problem:
            raise ValueError(f"engines of {size} devices: {problem}")
    replica = smallest if replica_devices is None else replica_devices
    if replica < smallest or replica % smallest:
        raise ValueError(
            f"a replica of {replica} devices holds no whole engines of {smallest}: a colocated "
            "replica spans the devices of one engine or of several"
        )
    device, weights = _memory(profiles)
    return Hardware(
        node_size=node_size,
        engine_devices=smallest,
        replica_devices=replica,
        device_bytes=device,
        weight_bytes=weights,
        heads=heads,
        profiles=dict(profiles),
        train_token_s=3.0 * smallest * profiles[smallest].prefill_token_s,
    )


def unsplit(heads: int, kv_heads: int, size: int) -> str | None:
    """Why a model cannot be split into so many parts, as vLLM does it; None where it can."""
    if heads % size:
        return f"{size} does not divide its {heads} attention heads{_parts(heads, kv_heads)}"
    if not _even(kv_heads, size):
        return (
            f"{size} parts neither split nor repeat its {kv_heads} heads of keys and values "
            f"evenly{_parts(heads, kv_heads)}"
        )
    return None


def _even(kv_heads: int, size: int) -> bool:
    """Heads of keys and values are split up, or each is kept on several devices."""
    return kv_heads % size == 0 or size % max(1, kv_heads) == 0


def _parts(heads: int, kv_heads: int) -> str:
    """Into how many parts the model can be split, in words."""
    sizes = [n for n in range(2, heads + 1) if heads % n == 0 and _even(kv_heads, n)]
    return f" (1, {', '.join(map(str, sizes))} would do)" if sizes else " (only 1 would do)"


def _memory(profiles: Mapping[int, EngineProfile]) -> tuple[float, float]:
    """Memory of a device and of all weights, in what the KV of one token takes.

    Each device of a group has left for KV what its share of the weights does not take: two sizes
    give both unknowns, of one alone the weights do not matter.
    """
    smallest, largest = min(profiles), max(profiles)
    of_device = {size: profiles[size].kv_tokens / size for size in (smallest, largest)}
    if smallest == largest:
        return of_device[smallest], 0.0
    more = of_device[largest] - of_device[smallest]
    weights = max(0.0, more / (1.0 / smallest - 1.0 / largest))
    return of_device[largest] + weights / largest, weights
