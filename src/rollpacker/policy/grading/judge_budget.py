"""What the judge may use of the devices that it shares with the rollout (RollPacker, section 4.3).

It streams most of its layers from host memory. What is decided here is acted upon by the drivers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeModel:
    """What one replica of the judge needs.

    Args:
        layers: its blocks.
        layer_bytes: weights of a block.
        fixed_bytes: embeddings, head and buffers, always resident.
        token_bytes: activations and KV of one token of a running sequence.
        token_seconds: compute of one token in one block.
        copy_seconds: copy of one block from host memory.
    """

    layers: int
    layer_bytes: int
    fixed_bytes: int
    token_bytes: float
    token_seconds: float
    copy_seconds: float

    def bytes_needed(self, resident: int, tokens: int) -> float:
        """Peak device memory: two more blocks than are resident, one in use and one on its way."""
        held = min(self.layers, resident + 2)
        return self.fixed_bytes + held * self.layer_bytes + tokens * self.token_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgePlan:
    """The ``concurrency`` shortest waiting sequences run, ``resident`` layers stay."""

    concurrency: int
    resident: int


class JudgeBudget:
    """Concurrency and resident layers of a judge replica.

    A pass takes as long as its compute or as the copies of the layers that are not resident,
    whichever is longer. Starting from one sequence and one layer, whatever speeds the judge up
    most per byte is added next, until copies hide behind compute (the rest of the memory stays
    with the actor) or memory ends. That order does not depend on the memory, so more memory
    never means fewer layers or sequences.

    Args:
        model: the judge.
        most: sequences in a batch.
    """

    def __init__(self, model: JudgeModel, most: int = 256) -> None:
        if model.layers < 1 or most < 1:
            raise ValueError(f"a judge needs layers >= 1 and most >= 1, got {model.layers}, {most}")
        self._model = model
        self._most = most

    def decide(self, waiting: Sequence[int], free_bytes: float) -> JudgePlan | None:
        """The plan for ``waiting`` lengths in tokens; None when nothing waits or fits."""
        lengths = sorted(waiting)[: self._most]
        if not lengths or self._model.bytes_needed(1, lengths[0]) > free_bytes:
            return None
        count, resident, tokens = 1, self._kept(1), lengths[0]
        while self._copies(resident) > self._compute(tokens):
            longer = tokens + lengths[count] if count < len(lengths) else tokens
            if self._layer_first(resident, tokens, longer):
                step = (count, self._kept(resident + 1), tokens)
            else:
                step = (count + 1, resident, longer)
            if self._model.bytes_needed(step[1], step[2]) > free_bytes:
                break
            count, resident, tokens = step
        return JudgePlan(concurrency=count, resident=resident)

    def _kept(self, resident: int) -> int:
        """The last two layers cost no memory: their place is the copies' place."""
        return self._model.layers if resident + 2 >= self._model.layers else resident

    def _copies(self, resident: int) -> float:
        return (self._model.layers - resident) * self._model.copy_seconds

    def _compute(self, tokens: int) -> float:
        return self._model.layers * tokens * self._model.token_seconds

    def _speed(self, resident: int, tokens: int) -> float:
        seconds = max(self._copies(resident), self._compute(tokens))
        return tokens / seconds if seconds > 0.0 else math.inf

    def _layer_first(self, resident: int, tokens: int, longer: int) -> bool:
        """Whether a layer is the better use of the next bytes than a sequence."""
        if longer == tokens:
            return True
        now = self._speed(resident, tokens)
        layer = self._speed(self._kept(resident + 1), tokens) - now
        sequence = self._speed(resident, longer) - now
        sequence_bytes = (longer - tokens) * self._model.token_bytes
        return layer * sequence_bytes >= sequence * self._model.layer_bytes
