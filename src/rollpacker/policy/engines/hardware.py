"""Offline profiles of machines whose engines span several devices. Engines are numbered at the
smallest size. Neighbours can form one engine of a larger tensor-parallel size, and a training
replica may need the devices of several."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollpacker.core.types import Device, EngineId, ReplicaId, RoundKind
from rollpacker.policy.engines.fleet import Fleet

Floats = NDArray[np.float64]
Tokens = NDArray[np.int64]


MOST_ROWS = 128  # rows of a step up to which each further one costs about the same
_CHEAPEST = 1e-4
"""Row cost if none was measured. On a large GPU a row is a few thousandths of a step."""


_FREE = 1.15  # time of a step with all free rows, relative to its least time


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCosts:
    """Costs of a decode step's rows, one for each token that it runs.

    Args:
        free: rows that take about as long as one, as a step reads all weights anyway.
        each: cost of each further row, as a share of a small step.
    """

    free: int
    each: float

    def seconds(self, rows: int) -> float:
        """Time of a step relative to a small one. Free rows cost a little too."""
        share = min(1.0, (rows - 1) / (self.free - 1)) if self.free > 1 else 0.0
        return 1.0 + (_FREE - 1.0) * share + self.each * max(0, rows - self.free)


class LatencyCurve:
    """Seconds of one decode step of one engine, by batch size. Piecewise linear through the
    measured ``points``, made non-decreasing. Flat below the first, with the last slope above the
    last. Raises ``ValueError`` without a positive point."""

    def __init__(self, points: Mapping[int, float]) -> None:
        if not points or min(points) < 1 or min(points.values()) <= 0.0:
            raise ValueError("a latency curve needs batch sizes >= 1 with times > 0")
        self.points = points
        self.largest = max(points)
        self._batch: Floats = np.array(sorted(points), np.float64)
        self._seconds: Floats = np.maximum.accumulate([points[size] for size in sorted(points)])
        rise = np.diff(self._seconds[-2:]) / np.diff(self._batch[-2:])
        self._slope = float(rise[0]) if rise.size else 0.0

    def rows(self) -> RowCosts:
        """Row costs, by the line nearest to the points up to ``MOST_ROWS``."""
        near = self._batch <= max(MOST_ROWS, float(self._batch[0]))
        batch = self._batch[near]
        seconds = np.array([self.points[int(size)] for size in batch])
        least = float(seconds.min())
        free = float(np.interp(_FREE * least, np.maximum.accumulate(seconds), batch))
        if batch.size < 2:
            return RowCosts(free=int(free), each=_CHEAPEST)
        spread = batch - batch.mean()
        slope = float(spread @ seconds) / float(spread @ spread)
        return RowCosts(free=int(free), each=max(slope / least, _CHEAPEST))

    def at(self, batch: float) -> float:
        if batch <= 0.0:
            return 0.0
        beyond = max(0.0, batch - float(self._batch[-1]))
        return float(np.interp(batch, self._batch, self._seconds)) + self._slope * beyond

    def within(self, batch: Floats) -> Floats:
        return np.interp(batch, self._batch, self._seconds)


def consolidation_threshold(
    latency: Callable[[int], float], engines: int, largest: int, slack: float = 0.25
) -> int:
    """Most running attempts that one engine decodes nearly as fast as all ``engines`` would.

    The largest ``n <= largest`` with ``latency(n) <= (1 + slack) * latency(ceil(n / engines))``.
    Below it, moving the tail to one engine frees the others at ``slack`` of the tail's speed. 0
    with a single engine.
    """
    if engines < 2:
        return 0
    return next(
        (
            n
            for n in range(largest, 0, -1)
            if latency(n) <= (1.0 + slack) * latency(math.ceil(n / engines))
        ),
        0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """Limits of the possible engine sizes.

    Args:
        device_bytes: for weights and KV.
        weight_bytes: of the model, sharded over a group within a node.
        heads: of attention, 0 if they do not matter.
    """

    node_size: int
    device_bytes: float
    weight_bytes: float
    heads: int = 0

    def sizes(self) -> tuple[int, ...]:
        """Possible sizes, ascending. Raises ``ValueError`` when the model fits into no node."""
        found = tuple(
            size
            for size in range(1, self.node_size + 1)
            if self.node_size % size == 0
            and self.heads % size == 0
            and size * self.device_bytes > self.weight_bytes
        )
        if not found:
            raise ValueError(
                f"weights of {self.weight_bytes / 1e9:.1f} GB fit into no tensor-parallel group of "
                f"a node of {self.node_size} x {self.device_bytes / 1e9:.1f} GB"
            )
        return found


_GROWTH = 1.05
"""Growth of preemptions over the previous round of the kind from which the paper doubles the
size."""
_CALM_ROUNDS = 4  # rounds of one kind in a row without a preemption before the paper halves it


@dataclass(slots=True)
class _Pressure:
    tp: int
    previous: int | None = None
    calm: int = 0


class PaperPlanner:
    """The tensor-parallel size of a round's engines (RollPacker, section 4.2). It doubles when
    preemptions grow, and halves after a while without any.

    Each kind of round has its own state, and begins at the least of ``sizes``. The paper starts at
    the best size without tail batching.
    """

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self._sizes = sizes
        self._kinds: dict[RoundKind, _Pressure] = {}

    def observe(self, kind: RoundKind, tp: int, preemptions: int) -> None:
        seen = self._kinds.setdefault(kind, _Pressure(tp))
        seen.tp = tp
        before, seen.previous = seen.previous, preemptions
        seen.calm = 0 if preemptions else seen.calm + 1
        if before is not None and preemptions > _GROWTH * before:
            self._move(seen, 2 * seen.tp)
        elif seen.calm >= _CALM_ROUNDS:
            seen.calm = 0
            self._move(seen, seen.tp // 2)

    def _move(self, seen: _Pressure, size: int) -> None:
        if size in self._sizes:
            seen.tp = size

    def plan(self, kind: RoundKind) -> int:
        return self._kinds[kind].tp if kind in self._kinds else self._sizes[0]

    def state_dict(self) -> dict[str, Any]:
        return {str(kind): asdict(seen) for kind, seen in self._kinds.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        kinds = {RoundKind(kind): _Pressure(**seen) for kind, seen in state.items()}
        self._kinds = {kind: seen for kind, seen in kinds.items() if seen.tp in self._sizes}


@dataclass(frozen=True, kw_only=True)
class EngineProfile:
    """One engine at one tensor-parallel size. 0 stands for unknown seconds.

    Args:
        kv_tokens: KV budget.
        latency: seconds of a decode step by batch size, without context, up to the largest batch.
        context_token_s: seconds that each context token adds to a step.
        prefill_token_s: seconds to prefill a token.
    """

    kv_tokens: float
    latency: dict[int, float]
    context_token_s: float = 0.0
    prefill_token_s: float = 0.0

    @cached_property
    def _curve(self) -> LatencyCurve:
        return LatencyCurve(self.latency)

    def step_s(self, batch: Floats, context: Floats) -> Floats:
        """Seconds of decode steps of ``batch`` sequences with ``context`` tokens in all. Sequences
        beyond the largest batch take turns, so their steps take longer in proportion."""
        turns = np.maximum(1.0, batch / self._curve.largest)
        return self._curve.within(batch) * turns + self.context_token_s * context

    def decode_s(self, contexts: Tokens, remaining: Tokens) -> float:
        order = np.argsort(remaining, kind="stable")
        ends = remaining[order]
        steps = np.diff(ends, prepend=0)
        batch = np.arange(ends.size, 0, -1, dtype=np.float64)
        # Contexts of the sequences that still run, and their growth.
        held = np.cumsum(contexts[order][::-1])[::-1] + batch * (ends - steps / 2.0)
        return float(np.sum(steps * self.step_s(batch, held)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Devices and the engines that they can form.

    Args:
        engine_devices, replica_devices: of the smallest engine, and of a training replica.
        profiles: engines by tensor-parallel size, ``engine_devices`` among them.
        train_token_s: device-seconds of gradient per token.
    """

    node_size: int
    engine_devices: int
    replica_devices: int
    profiles: dict[int, EngineProfile]
    train_token_s: float

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(sorted(self.profiles))

    def fleet(self, engines: tuple[EngineId, ...], tp: int) -> Fleet:
        """Engines of ``tp`` devices, made of these, and the replicas on them. An engine's lowest
        part runs it."""
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


def measured(
    profiles: Mapping[int, EngineProfile],
    *,
    devices: int,
    node_size: int,
    replica_devices: int | None = None,
    heads: int = 0,
    kv_heads: int = 0,
) -> Hardware:
    """Devices with measured engines.

    A gradient token costs three times a prefilled one, as a backward pass is two forward passes.

    Args:
        profiles: engines by each possible tensor-parallel size.
        devices: number that decode.
        replica_devices: of a training replica. None if it has its own.
        heads, kv_heads: of the model, 0 if they do not matter.

    Raises ``ValueError`` for sizes that the model or the devices cannot have.
    """
    smallest = min(profiles)
    for size in sorted(profiles):
        problem = unsplit(heads, kv_heads, size)
        if size % smallest:
            problem = f"they are no multiple of engines of {smallest}"
        if node_size % size or devices % size:
            problem = f"they do not divide {devices} devices in nodes of {node_size}"
        if problem:
            raise ValueError(f"engines of {size} devices: {problem}")
    replica = smallest if replica_devices is None else replica_devices
    if replica < smallest or replica % smallest:
        raise ValueError(
            f"a replica of {replica} devices holds no whole engines of {smallest}, as a colocated "
            "replica must"
        )
    return Hardware(
        node_size=node_size,
        engine_devices=smallest,
        replica_devices=replica,
        profiles=dict(profiles),
        train_token_s=3.0 * smallest * profiles[smallest].prefill_token_s,
    )


def unsplit(heads: int, kv_heads: int, size: int) -> str | None:
    """Why vLLM cannot split a model into ``size`` parts. None if it can."""
    if heads % size:
        return f"{size} does not divide its {heads} attention heads{_parts(heads, kv_heads)}"
    if not _even(kv_heads, size):
        return (
            f"{size} parts neither split nor repeat its {kv_heads} heads of keys and values "
            f"evenly{_parts(heads, kv_heads)}"
        )
    return None


def _even(kv_heads: int, size: int) -> bool:
    return kv_heads % size == 0 or size % max(1, kv_heads) == 0


def _parts(heads: int, kv_heads: int) -> str:
    sizes = [n for n in range(2, heads + 1) if heads % n == 0 and _even(kv_heads, n)]
    return f" (1, {', '.join(map(str, sizes))} would do)" if sizes else " (only 1 would do)"
