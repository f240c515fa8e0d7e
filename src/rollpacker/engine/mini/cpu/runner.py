"""The CPU runner: numba kernels over packed weights and blocked KV."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from rollpacker.engine.base import Floats, Ints
from rollpacker.engine.host_memory import free_bytes
from rollpacker.engine.mini.cpu.forward import forward, project
from rollpacker.engine.mini.cpu.lanes import COLUMNS, LANES
from rollpacker.engine.mini.cpu.packing import PackedWeights
from rollpacker.engine.mini.runner import TokenRows
from rollpacker.engine.mini.shape import Shape, rope_tables
from rollpacker.engine.sampling.compiled import draw_compiled
from rollpacker.engine.sampling.race import RowDraws

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_MOST_ROWS = 512
"""Rows run together: enough to amortise streaming the weights, few enough to stay in cache."""
_MOST_LOGITS = 1 << 23


class CpuRunner:
    """Runs a model on one CPU thread. Bit-identical results whatever runs beside a sequence."""

    block_size = LANES
    exact = True
    equal_rows = False

    def __init__(self, model: PreTrainedModel, shape: Shape) -> None:
        self._shape = shape
        self._weights = PackedWeights(model, shape)
        cos, sin = rope_tables(model, shape.context)
        self._rope = (cos.numpy(), sin.numpy(), np.float32(shape.eps), np.float32(shape.scale))
        columns = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        self._sizes = (shape.hidden, shape.head_dim, columns, shape.inner, shape.layers)
        self._group = (0,) * (shape.heads // shape.kv_heads)
        self._cache: tuple[Any, ...] = ()

    def _block_elements(self) -> int:
        padded = -(-self._shape.head_dim // COLUMNS) * COLUMNS
        return self._shape.kv_heads * padded * LANES

    def kv_bytes(self) -> int:
        """Bytes of one block."""
        return 2 * self._shape.layers * self._block_elements() * self._weights.embed.itemsize

    def free_bytes(self, sharers: int) -> int:
        """Memory that is free on this machine, for one of so many processes that share it."""
        return free_bytes() // sharers

    def allocate(self, blocks: int) -> None:
        """Allocate the KV blocks; memory is taken as they are first used."""
        size = self._shape.layers * blocks * self._block_elements()
        keys = np.zeros(size, self._weights.embed.dtype)
        values = np.zeros(size, self._weights.embed.dtype)
        lanes = self._weights.panels.dtype
        self._cache = (
            keys,
            values,
            keys.view(lanes),
            values.view(lanes),
            blocks,
            self._shape.kv_heads,
        )

    def release(self) -> None:
        """Give the KV memory back."""
        self._cache = ()

    def refresh(self, *, force: bool = False) -> None:
        """Pack the weights again if they have changed."""
        self._weights.refresh(force=force)

    def copy_block(self, source: int, target: int) -> None:
        """Copy one block in all layers."""
        for flat in self._cache[:2]:
            blocks = flat.reshape(self._shape.layers, self._cache[4], -1)
            blocks[:, target] = blocks[:, source]

    def forward(self, rows: TokenRows, tables: Ints) -> Any:
        """Normed last hidden states (m, hidden) of the rows to keep, as the kernels store them."""
        n = len(rows.tokens)
        if n <= _MOST_ROWS:
            return self._forward(rows, tables)
        parts = []
        for start in range(0, n, _MOST_ROWS):
            cut = slice(start, start + _MOST_ROWS)
            inside = (rows.keep >= start) & (rows.keep < start + _MOST_ROWS)
            part = TokenRows(
                rows.tokens[cut],
                rows.positions[cut],
                rows.slots[cut],
                rows.keep[inside] - np.int32(start),
            )
            parts.append(self._forward(part, tables))
        return np.concatenate(parts)

    def _forward(self, rows: TokenRows, tables: Ints) -> Any:
        w = self._weights
        return forward(
            rows.tokens,
            (rows.positions, rows.slots, tables),
            rows.keep,
            w.embed,
            w.panels,
            w.starts,
            w.vectors,
            w.splits,
            self._sizes,
            self._group,
            self._cache,
            self._rope,
        )

    def join(self, parts: list[Any]) -> Any:
        """Hidden states of several calls in one array."""
        return np.concatenate(parts)

    def sample(self, hidden: Any, rows: Ints, draws: RowDraws) -> tuple[Ints, Floats]:
        """Tokens and their logprobs, each (d,)."""
        size = self._shape.vocabulary
        most = max(1, _MOST_LOGITS // size)
        if len(hidden) <= most:
            return draw_compiled(self.logits(hidden), size, rows, draws)
        tokens, logprobs = np.empty(len(rows), np.int32), np.empty(len(rows), np.float32)
        for start in range(0, len(hidden), most):
            logits = self.logits(hidden[start : start + most])
            mine = np.flatnonzero((rows >= start) & (rows < start + most))
            part = rows[mine] - np.int32(start), draws.of(mine)
            tokens[mine], logprobs[mine] = draw_compiled(logits, size, *part)
        return tokens, logprobs

    def logits(self, hidden: Any) -> Floats:
        """Logits (m, at least vocabulary) of hidden states."""
        w = self._weights
        return project(hidden, w.panels, w.head, self._shape.vocabulary)
