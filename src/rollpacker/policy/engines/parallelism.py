"""Which tensor-parallel size a round's engines run at (RollPacker, section 4.2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rollpacker.core.types import RoundKind


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


_GROWTH = 1.05
"""Preemptions over those of the previous like round from which the paper doubles the size."""
_CALM_ROUNDS = 4
"""Like rounds in a row without a preemption after which it halves it."""


@dataclass(slots=True)
class _Pressure:
    tp: int
    previous: int | None = None
    calm: int = 0


class PaperPlanner:
    """Doubles the size when preemptions grow, halves it when there are none for a while.

    Each kind of round has its own state. The paper's initial size is the best one without tail
    batching.

    Args:
        devices: which sizes are possible.
        initial: size before anything is known.
    """

    def __init__(self, devices: Devices, initial: int) -> None:
        self._sizes = devices.sizes()
        self._initial = self._checked(initial)
        self._kinds: dict[RoundKind, _Pressure] = {}

    def _checked(self, size: int) -> int:
        if size not in self._sizes:
            known = ", ".join(map(str, self._sizes))
            raise ValueError(f"initial tensor-parallel size {size} is not possible; choose {known}")
        return size

    def observe(self, kind: RoundKind, tp: int, preemptions: int) -> None:
        """A round of this kind is over, which ran at size ``tp``."""
        seen = self._kinds.setdefault(kind, _Pressure(self._initial))
        seen.tp = self._checked(tp)
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
        """Size of the next round of this kind. Changes nothing: asked twice, it says the same."""
        return self._kinds[kind].tp if kind in self._kinds else self._initial

    def state_dict(self) -> dict[str, Any]:
        """What outlives a step, as JSON."""
        return {str(kind): asdict(seen) for kind, seen in self._kinds.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore ``state_dict``; of a size that is not possible any more, nothing."""
        kinds = {RoundKind(kind): _Pressure(**seen) for kind, seen in state.items()}
        self._kinds = {kind: seen for kind, seen in kinds.items() if seen.tp in self._sizes}
