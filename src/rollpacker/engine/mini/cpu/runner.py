"""The CPU runner: numba kernels over packed weights and blocked KV."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rollpacker.engine.base import Floats, Ints, free_bytes
from rollpacker.engine.mini.cpu.kernels import forward, project
from rollpacker.engine.mini.cpu.lanes import COLUMNS, HAS_BF16_DOT, LANES
from rollpacker.engine.mini.runner import Shape, TokenRows, rope_tables
from rollpacker.engine.sampling.compiled import draw_compiled
from rollpacker.engine.sampling.race import RowDraws

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


class PackedWeights:
    """A copy of a model's weights for the kernels.

    float32 models are packed as float32. Others are packed as bfloat16 if the CPU multiplies those,
    else as float32.

    Attributes:
        panels: every matrix's panels, float32, or int32 lanes of two bfloat16.
        starts: (layers, 4) int64: where qkv, o, gate-up and down start in ``panels``.
        vectors: (layers + 1, V) float32: norms and biases of each layer, then the last norm.
        splits: where the vectors of a layer end, in the order of the kernels.
        embed: (vocabulary, hidden) float32 or bfloat16 bits, in the model's own memory if possible.
    """

    def __init__(self, model: PreTrainedModel, shape: Shape) -> None:
        self._model: Any = model
        self._shape = shape
        self._parameters = list(model.parameters())
        half = self._parameters[0].dtype != torch.float32 and HAS_BF16_DOT
        self._dtype = torch.bfloat16 if half else torch.float32
        self._versions = -1
        pair = 2 if half else 1
        starts, total = self._plan()
        self.starts = np.array(starts[:-1], np.int64).reshape(shape.layers, 4) // pair
        self.head = starts[-1] // pair
        self._starts = starts
        self._flat = torch.zeros(total, dtype=self._dtype)
        self.panels = _array(self._flat, lanes=True)
        first = self._vectors(self._layers[0])
        self.splits = tuple(int(n) for n in np.cumsum([len(v) for v in first]))
        self.vectors = np.zeros((shape.layers + 1, self.splits[-1]), np.float32)
        self.refresh()

    @property
    def _layers(self) -> Any:
        return self._model.get_decoder().layers

    def _plan(self) -> tuple[list[int], int]:
        s = self._shape
        wide = s.heads * s.head_dim
        qkv = wide + 2 * s.kv_heads * s.head_dim
        sizes = [(qkv, s.hidden), (s.hidden, wide), (2 * s.inner, s.hidden), (s.hidden, s.inner)]
        sizes = sizes * s.layers + [(s.vocabulary, s.hidden)]
        ends = np.cumsum([_round_up(n, COLUMNS) * _round_up(k, 2) for n, k in sizes])
        return [0, *(int(e) for e in ends[:-1])], int(ends[-1])

    @torch.no_grad()
    def refresh(self, *, force: bool = False) -> None:
        versions = sum(p._version for p in self._parameters)
        if versions == self._versions and not force:
            return
        self._versions = versions
        starts = iter(self._starts)
        for index, layer in enumerate(self._layers):
            own = layer.self_attn
            fused = [
                (own.q_proj, own.k_proj, own.v_proj),
                (own.o_proj,),
                (layer.mlp.gate_proj, layer.mlp.up_proj),
                (layer.mlp.down_proj,),
            ]
            for modules in fused:
                self._pack(next(starts), [m.weight.detach() for m in modules])
            self.vectors[index] = np.concatenate(self._vectors(layer))
        self._pack(next(starts), [self._model.get_output_embeddings().weight.detach()])
        decoder = self._model.get_decoder()
        self.vectors[-1, : self._shape.hidden] = _floats(decoder.norm.weight)
        embed = self._model.get_input_embeddings().weight.detach()
        self.embed = _array(embed.to(self._dtype).contiguous(), lanes=False)

    def _pack(self, start: int, parts: list[torch.Tensor]) -> None:
        depth = parts[0].shape[1]
        pair = 2 if self._dtype == torch.bfloat16 else 1
        rows = sum(len(p) for p in parts)
        deep = _round_up(depth, 2)
        matrix = torch.zeros(_round_up(rows, COLUMNS), deep, dtype=self._dtype)
        matrix[:rows, :depth] = torch.cat([p.to(self._dtype) for p in parts])
        panels = matrix.view(-1, COLUMNS, deep // pair, pair).permute(0, 2, 1, 3)
        self._flat[start : start + matrix.numel()].view(panels.shape).copy_(panels)

    def _vectors(self, layer: Any) -> list[np.ndarray]:
        own, mlp = layer.self_attn, layer.mlp
        return [
            _floats(layer.input_layernorm.weight),
            _biases(own.q_proj, own.k_proj, own.v_proj),
            _floats(own.q_norm.weight) if hasattr(own, "q_norm") else _biases(),
            _floats(own.k_norm.weight) if hasattr(own, "k_norm") else _biases(),
            _biases(own.o_proj),
            _floats(layer.post_attention_layernorm.weight),
            _biases(mlp.gate_proj, mlp.up_proj),
            _biases(mlp.down_proj),
        ]


def _floats(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().float().numpy()


def _biases(*linears: Any) -> np.ndarray:
    found = [_floats(linear.bias) for linear in linears if linear.bias is not None]
    assert len(found) in (0, len(linears))
    return np.concatenate(found) if found else np.zeros(0, np.float32)


def _array(tensor: torch.Tensor, *, lanes: bool) -> np.ndarray:
    """A numpy view: float32, bfloat16 bits as uint16, or pairs of them as int32 lanes."""
    if tensor.dtype == torch.float32:
        return tensor.numpy()
    return tensor.view(torch.int32 if lanes else torch.uint16).numpy()


_MOST_ROWS = 512  # enough to amortise streaming the weights, and few enough for the cache
_MOST_LOGITS = 1 << 23


class CpuRunner:
    """Runs a model on one CPU thread, bit-identical for every batch."""

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
        return 2 * self._shape.layers * self._block_elements() * self._weights.embed.itemsize

    def free_bytes(self, sharers: int) -> int:
        return free_bytes() // sharers

    def allocate(self, blocks: int) -> None:
        size = self._shape.layers * blocks * self._block_elements()
        keys = np.zeros(size, self._weights.embed.dtype)
        values = np.zeros(size, self._weights.embed.dtype)
        lanes = self._weights.panels.dtype
        views = keys.view(lanes), values.view(lanes)
        self._cache = (keys, values, *views, blocks, self._shape.kv_heads)

    def release(self) -> None:
        self._cache = ()

    def refresh(self, *, force: bool = False) -> None:
        self._weights.refresh(force=force)

    def copy_block(self, source: int, target: int) -> None:
        for flat in self._cache[:2]:
            blocks = flat.reshape(self._shape.layers, self._cache[4], -1)
            blocks[:, target] = blocks[:, source]

    def forward(self, rows: TokenRows, tables: Ints) -> Any:
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
        return np.concatenate(parts)

    def sample(self, hidden: Any, rows: Ints, draws: RowDraws) -> tuple[Ints, Floats]:
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
