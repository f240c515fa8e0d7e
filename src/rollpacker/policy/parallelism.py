"""Which tensor-parallel size a round's engines run at.

``PaperPlanner`` follows preemptions (RollPacker, section 4.2). ``ForecastPlanner`` predicts the
time of the next like round at every size, and moves only for a saving that is larger than what
noise could feign.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rollpacker.core.types import RoundKind
from rollpacker.policy.lengths import LengthHistory


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """What decides which sizes are possible.

    Args:
        node_size: devices of a node; a tensor-parallel group never leaves its node.
        device_bytes: memory of a device that weights and KV may use.
        weight_bytes: all weights, sharded over the group.
        heads: attention heads, which a size must divide; 0 where it does not matter.
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
            and self.kv_per_device(size) > 0.0
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundReport:
    """What a round's engines went through.

    Args:
        kind: the round's.
        tp: size that it ran at.
        preemptions: over all engines.
        peak_kv: largest share of an engine's KV budget in use, 0 to 1.
        seconds: of the rollout.
    """

    kind: RoundKind
    tp: int
    preemptions: int
    peak_kv: float
    seconds: float


class Planner(Protocol):
    """Chooses sizes from reports. ``plan`` changes nothing: asked twice, it says the same."""

    def observe(self, report: RoundReport) -> None:
        """Take the report of a round that is over."""
        ...

    def plan(self, kind: RoundKind) -> int:
        """Size of the next round of this kind."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What outlives a step, as JSON."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore ``state_dict``."""
        ...


def _checked(initial: int, sizes: tuple[int, ...]) -> int:
    if initial not in sizes:
        known = ", ".join(map(str, sizes))
        raise ValueError(f"initial tensor-parallel size {initial} is not possible; choose {known}")
    return initial


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperSettings:
    """The paper's constants.

    Args:
        devices: which sizes are possible.
        initial: size to start from: the best one without tail batching.
        growth: preemptions over those of the previous like round from which the size doubles.
        calm_rounds: like rounds in a row without a preemption after which it halves.
    """

    devices: Devices
    initial: int
    growth: float = 1.05
    calm_rounds: int = 4


@dataclass(slots=True)
class _Pressure:
    tp: int
    previous: int | None = None
    calm: int = 0


class PaperPlanner:
    """Doubles the size when preemptions grow, halves it when there are none for a while.

    Each kind of round has its own state.
    """

    def __init__(self, settings: PaperSettings) -> None:
        self._settings = settings
        self._sizes = settings.devices.sizes()
        self._initial = _checked(settings.initial, self._sizes)
        self._kinds: dict[RoundKind, _Pressure] = {}

    def observe(self, report: RoundReport) -> None:
        """Take the report of a round that is over."""
        seen = self._kinds.setdefault(report.kind, _Pressure(self._initial))
        seen.tp = _checked(report.tp, self._sizes)
        before, seen.previous = seen.previous, report.preemptions
        seen.calm = 0 if report.preemptions else seen.calm + 1
        if before is not None and report.preemptions > self._settings.growth * before:
            self._move(seen, 2 * seen.tp)
        elif seen.calm >= self._settings.calm_rounds:
            seen.calm = 0
            self._move(seen, seen.tp // 2)

    def _move(self, seen: _Pressure, size: int) -> None:
        if size in self._sizes:
            seen.tp = size

    def plan(self, kind: RoundKind) -> int:
        """Size of the next round of this kind."""
        return self._kinds[kind].tp if kind in self._kinds else self._initial

    def state_dict(self) -> dict[str, Any]:
        """What outlives a step, as JSON."""
        return {str(kind): asdict(seen) for kind, seen in self._kinds.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore ``state_dict``."""
        self._kinds = {RoundKind(kind): _Pressure(**seen) for kind, seen in state.items()}


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


class RoundCost(Protocol):
    """Predicted seconds of a round at a size; infinite where it cannot run."""

    def __call__(self, tp: int, lengths: LengthForecast, kind: RoundKind, /) -> float:
        """Seconds of the rollout."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastSettings:
    """When a better size is worth a move.

    Args:
        devices: which sizes are possible.
        initial: size before anything is known.
        margin: share of a round's time that a move must save; the guard against noise.
        patience: like rounds in a row in which a move must be worth it.
    """

    devices: Devices
    initial: int
    margin: float = 0.1
    patience: int = 2


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


class ForecastPlanner:
    """Moves a kind of round to the size with the least predicted time, with hysteresis.

    Predictions are corrected by what was measured, at a size that never ran by what was measured
    at the present one: a wrong cost model is found out after one move.

    Args:
        settings: when a move is worth it.
        cost: predicted seconds by size.
        forecast: what is known now of the next round of a kind; None if nothing.
    """

    def __init__(
        self,
        settings: ForecastSettings,
        cost: RoundCost,
        forecast: Callable[[RoundKind], LengthForecast | None],
    ) -> None:
        self._settings = settings
        self._cost = cost
        self._forecast = forecast
        self._sizes = settings.devices.sizes()
        self._initial = _checked(settings.initial, self._sizes)
        self._kinds: dict[RoundKind, _Seen] = {}

    def observe(self, report: RoundReport) -> None:
        """Take the report of a round that is over; this is where a kind's size may change."""
        seen = self._kinds.setdefault(report.kind, _Seen(report.tp))
        seen.tp = _checked(report.tp, self._sizes)
        predicted = self._predicted(report.kind)
        if math.isfinite(predicted.get(seen.tp, math.inf)) and report.seconds > 0.0:
            error = seen.errors.setdefault(seen.tp, _Error())
            error.add(math.log(report.seconds / predicted[seen.tp]))
        self._decide(report, seen, self._corrected(seen, predicted))

    def _predicted(self, kind: RoundKind) -> dict[int, float]:
        lengths = self._forecast(kind)
        if lengths is None:
            return {}
        return {tp: self._cost(tp, lengths, kind) for tp in self._sizes}

    def _corrected(self, seen: _Seen, predicted: Mapping[int, float]) -> dict[int, float]:
        """Seconds of a like round by size."""
        here = seen.errors.get(seen.tp, _Error())
        return {
            tp: seconds * math.exp(seen.errors.get(tp, here).mean)
            for tp, seconds in predicted.items()
        }

    def _decide(self, report: RoundReport, seen: _Seen, seconds: Mapping[int, float]) -> None:
        rules = self._settings
        allowed = [tp for tp in seconds if tp >= seen.tp or self._holds(report, tp)]
        if not allowed:
            return
        best = min(allowed, key=lambda tp: (seconds[tp], tp != seen.tp, tp))
        now = seconds[seen.tp]
        clear = seconds[best] < (1.0 - rules.margin) * now
        seen.worth = seen.worth + 1 if best != seen.tp and clear else 0
        if seen.worth >= rules.patience:
            seen.tp, seen.worth = best, 0

    def _holds(self, report: RoundReport, tp: int) -> bool:
        """Whether the KV in use at the round's peak would fit at the smaller size ``tp``.

        Smaller groups repeat the weights, so all devices together hold less KV.
        """
        kv = self._settings.devices.kv_per_device
        return report.peak_kv * kv(report.tp) <= kv(tp)

    def plan(self, kind: RoundKind) -> int:
        """Size of the next round of this kind; the best prediction before the first."""
        if kind in self._kinds:
            return self._kinds[kind].tp
        seconds = self._predicted(kind)
        return min(seconds, key=lambda tp: (seconds[tp], tp)) if seconds else self._initial

    def state_dict(self) -> dict[str, Any]:
        """What outlives a step, as JSON."""
        return {
            str(kind): {
                "tp": seen.tp,
                "worth": seen.worth,
                "errors": {str(tp): asdict(error) for tp, error in seen.errors.items()},
            }
            for kind, seen in self._kinds.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore ``state_dict``."""
        self._kinds = {
            RoundKind(kind): _Seen(
                tp=seen["tp"],
                worth=seen["worth"],
                errors={int(tp): _Error(**error) for tp, error in seen["errors"].items()},
            )
            for kind, seen in state.items()
        }


_MEMORY = 8
"""Rounds that a size's prediction error is averaged over."""
