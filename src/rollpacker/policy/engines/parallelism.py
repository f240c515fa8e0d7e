"""Which tensor-parallel size a round's engines run at.

``PaperPlanner`` follows preemptions (RollPacker, section 4.2). ``ForecastPlanner`` predicts the
time of the next like round at every size, and moves only for a saving that is larger than what
noise could feign.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter

from rollpacker.core import events as ev
from rollpacker.core.types import RoundKind
from rollpacker.policy.lengths.lengths import LengthHistory


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """What decides which sizes are possible.

    Args:
        node_size: devices of a node; a tensor-parallel group never leaves its node.
        device_bytes: memory of a device that weights and KV may use.
        weight_bytes: all weights, sharded over the group.
        heads: attention heads, which a size must divide; 0 where it does not matter.
        known: sizes whose engines are known, where others are not possible.
    """

    node_size: int
    device_bytes: float
    weight_bytes: float
    heads: int = 0
    known: tuple[int, ...] | None = None

    def sizes(self) -> tuple[int, ...]:
        """Possible sizes, ascending. Raises ``ValueError`` when the model fits into no node."""
        found = tuple(
            size
            for size in range(1, self.node_size + 1)
            if self.node_size % size == 0
            and self.heads % size == 0
            and self.kv_per_device(size) > 0.0
            and (self.known is None or size in self.known)
        )
        if not found:
            raise ValueError(
                f"weights of {self.weight_bytes / 1e9:.1f} GB fit into no tensor-parallel group of "
                f"a node of {self.node_size} x {self.device_bytes / 1e9:.1f} GB"
            )
        return found

    def kv_per_device(self, size: int) -> float:
        """Bytes that each device of a group has left for KV."""
        return self.device_bytes - self.weight_bytes / size


class Planner(ABC):
    """Chooses sizes from what rounds went through.

    Args:
        devices: which sizes are possible.
        initial: size before anything is known.
    """

    _STATE: ClassVar[TypeAdapter[Any]]
    """What is kept of each kind of round."""

    def __init__(self, devices: Devices, initial: int) -> None:
        self._devices = devices
        self._sizes = devices.sizes()
        self._initial = self._checked(initial)
        self._kinds: dict[RoundKind, Any] = {}

    def _checked(self, size: int) -> int:
        if size not in self._sizes:
            known = ", ".join(map(str, self._sizes))
            raise ValueError(f"initial tensor-parallel size {size} is not possible; choose {known}")
        return size

    @abstractmethod
    def observe(self, kind: RoundKind, tp: int, measured: ev.RoundMeasured) -> None:
        """A round of this kind is over, which ran at size ``tp``."""

    @abstractmethod
    def plan(self, kind: RoundKind) -> int:
        """Size of the next round of this kind. Changes nothing: asked twice, it says the same."""

    def state_dict(self) -> dict[str, Any]:
        """What outlives a step, as JSON."""
        return self._STATE.dump_python(self._kinds, mode="json")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore ``state_dict``; of a size that is not possible any more, nothing."""
        kinds = self._STATE.validate_python(state)
        self._kinds = {kind: seen for kind, seen in kinds.items() if seen.tp in self._sizes}


_GROWTH = 1.05
"""Preemptions over those of the previous like round from which the paper doubles the size."""
_CALM_ROUNDS = 4
"""Like rounds in a row without a preemption after which it halves it."""


@dataclass(slots=True)
class _Pressure:
    tp: int
    previous: int | None = None
    calm: int = 0


class PaperPlanner(Planner):
    """Doubles the size when preemptions grow, halves it when there are none for a while.

    Each kind of round has its own state. The paper's initial size is the best one without tail
    batching.
    """

    _STATE = TypeAdapter(dict[RoundKind, _Pressure])

    def observe(self, kind: RoundKind, tp: int, measured: ev.RoundMeasured) -> None:
        """A round of this kind is over, which ran at size ``tp``."""
        seen: _Pressure = self._kinds.setdefault(kind, _Pressure(self._initial))
        seen.tp = self._checked(tp)
        before, seen.previous = seen.previous, measured.preemptions
        seen.calm = 0 if measured.preemptions else seen.calm + 1
        if before is not None and measured.preemptions > _GROWTH * before:
            self._move(seen, 2 * seen.tp)
        elif seen.calm >= _CALM_ROUNDS:
            seen.calm = 0
            self._move(seen, seen.tp // 2)

    def _move(self, seen: _Pressure, size: int) -> None:
        if size in self._sizes:
            seen.tp = size

    def plan(self, kind: RoundKind) -> int:
        """Size of the next round of this kind."""
        return self._kinds[kind].tp if kind in self._kinds else self._initial


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LengthForecast:
    """How many attempts a round keeps running for how long.

    Args:
        running: attempts still running after decode step ``t``, by ``t``, over all engines.
        prompt_tokens: mean prompt length.
    """

    running: NDArray[np.float64]
    prompt_tokens: float


def occupancy(
    history: LengthHistory, kind: RoundKind, attempts: int, prompt_tokens: float
) -> LengthForecast | None:
    """A round like those of the history's window; None before the first of this kind.

    Aborted attempts count as long as they ran: that is how long they held a place.
    """
    lengths = history.seen(kind).lengths
    if not lengths.size:
        return None
    ended = np.cumsum(np.bincount(lengths))
    return LengthForecast(
        running=attempts * (1.0 - ended / lengths.size), prompt_tokens=prompt_tokens
    )


@dataclass(slots=True)
class _Error:
    """Running mean of ``log(measured / predicted)`` at one size."""

    mean: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        self.count += 1
        self.mean += (value - self.mean) / min(self.count, _MEMORY)


@dataclass(slots=True)
class _Seen:
    tp: int
    worth: int = 0
    """Rounds in a row after which a move was worth it."""
    errors: dict[int, _Error] = field(default_factory=dict[int, _Error])


class ForecastPlanner(Planner):
    """Moves a kind of round to the size with the least predicted time, with hysteresis.

    Predictions are corrected by what was measured, at a size that never ran by what was measured
    at the present one: a wrong cost model is found out after one move.

    Args:
        devices: which sizes are possible.
        initial: size before anything is known.
        cost: predicted seconds of a rollout by size; infinite where it cannot run.
        forecast: what is known now of the next round of a kind; None if nothing.
        margin: share of a round's time that a move must save; the guard against noise.
        patience: like rounds in a row in which a move must be worth it.
    """

    _STATE = TypeAdapter(dict[RoundKind, _Seen])

    def __init__(
        self,
        devices: Devices,
        initial: int,
        cost: Callable[[int, LengthForecast], float],
        forecast: Callable[[RoundKind], LengthForecast | None],
        *,
        margin: float = 0.1,
        patience: int = 2,
    ) -> None:
        super().__init__(devices, initial)
        self._cost = cost
        self._forecast = forecast
        self._margin = margin
        self._patience = patience

    def observe(self, kind: RoundKind, tp: int, measured: ev.RoundMeasured) -> None:
        """A round of this kind is over; this is where its size may change."""
        seen: _Seen = self._kinds.setdefault(kind, _Seen(tp))
        seen.tp = self._checked(tp)
        predicted = self._predicted(kind)
        if math.isfinite(predicted.get(tp, math.inf)) and measured.seconds > 0.0:
            error = seen.errors.setdefault(tp, _Error())
            error.add(math.log(measured.seconds / predicted[tp]))
        self._decide(measured.peak_kv, seen, self._corrected(seen, predicted))

    def _predicted(self, kind: RoundKind) -> dict[int, float]:
        lengths = self._forecast(kind)
        if lengths is None:
            return {}
        return {tp: self._cost(tp, lengths) for tp in self._sizes}

    def _corrected(self, seen: _Seen, predicted: Mapping[int, float]) -> dict[int, float]:
        """Seconds of a like round by size."""
        here = seen.errors.get(seen.tp, _Error())
        return {
            tp: seconds * math.exp(seen.errors.get(tp, here).mean)
            for tp, seconds in predicted.items()
        }

    def _decide(self, peak_kv: float, seen: _Seen, seconds: Mapping[int, float]) -> None:
        allowed = [tp for tp in seconds if tp >= seen.tp or self._holds(peak_kv, seen.tp, tp)]
        if not allowed:
            return
        best = min(allowed, key=lambda tp: (seconds[tp], tp != seen.tp, tp))
        now = seconds[seen.tp]
        clear = seconds[best] < (1.0 - self._margin) * now
        seen.worth = seen.worth + 1 if best != seen.tp and clear else 0
        if seen.worth >= self._patience:
            seen.tp, seen.worth = best, 0

    def _holds(self, peak_kv: float, present: int, tp: int) -> bool:
        """Whether the KV in use at the round's peak would fit at the smaller size ``tp``.

        Smaller groups repeat the weights, so all devices together hold less KV.
        """
        kv = self._devices.kv_per_device
        return peak_kv * kv(present) <= kv(tp)

    def plan(self, kind: RoundKind) -> int:
        """Size of the next round of this kind; the best prediction before the first."""
        if kind in self._kinds:
            return self._kinds[kind].tp
        seconds = self._predicted(kind)
        return min(seconds, key=lambda tp: (seconds[tp], tp)) if seconds else self._initial


_MEMORY = 8
"""Rounds that a size's prediction error is averaged over."""
