"""The runner for other devices: torch over the model's own tensors and blocked KV."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F

from rollpacker.engine.base import Floats, Ints
from rollpacker.engine.mini.runner import Shape, TokenRows, rope_tables
from rollpacker.engine.sampling.race import RowDraws
from rollpacker.engine.sampling.rows import draw_rows

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_SHORT = 64  # Most rows of a draft. A longer run is a prompt.


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


class TorchRunner:
    """Runs a model on its own device, with attention over gathered, padded KV. With
    ``deterministic`` each row runs alone, so nothing can depend on the batch."""

    def __init__(
        self, model: PreTrainedModel, shape: Shape, *, block_size: int, deterministic: bool
    ) -> None:
        self.block_size = block_size
        self._model: Any = model
        self._decoder: Any = model.get_decoder()
        self._shape = shape
        self.exact = deterministic
        self.equal_rows = not deterministic
        weight = next(model.parameters())
        self._dtype, self._device = weight.dtype, weight.device
        cos, sin = rope_tables(model, shape.context)
        self._cos, self._sin = cos.to(self._dtype), sin.to(self._dtype)
        self._keys = self._values = torch.empty(0)

    def kv_bytes(self) -> int:
        s = self._shape
        elements = 2 * s.layers * s.kv_heads * s.head_dim * self.block_size
        return elements * self._dtype.itemsize

    def free_bytes(self, sharers: int) -> int:
        free, total = torch.cuda.mem_get_info(self._device)
        # Within its own share: the other processes may not have loaded their models yet.
        return max(0, min(free, total // sharers - torch.cuda.memory_reserved(self._device)))

    def allocate(self, blocks: int) -> None:
        s = self._shape
        size = (s.layers, blocks, self.block_size, s.kv_heads, s.head_dim)
        self._keys = torch.zeros(size, dtype=self._dtype, device=self._device)
        self._values = torch.zeros_like(self._keys)

    def release(self) -> None:
        self._keys = self._values = torch.empty(0)

    def refresh(self, *, force: bool = False) -> None:
        """Nothing to do: torch reads the model's own tensors."""

    def copy_block(self, source: int, target: int) -> None:
        for cache in (self._keys, self._values):
            cache[:, target] = cache[:, source]

    @torch.no_grad()
    def forward(self, rows: TokenRows, tables: Ints) -> torch.Tensor:
        cuts = self._cuts(rows.slots)
        parts = [
            self._run(rows.tokens[a:b], rows.positions[a:b], rows.slots[a:b], tables, each)
            for a, b, each in cuts
        ]
        return torch.cat(parts)[torch.from_numpy(rows.keep).to(self._device)]

    def _cuts(self, slots: Ints) -> list[tuple[int, int, int]]:
        """Ranges of rows that run together, and the rows of each sequence in them. A prompt has its
        own."""
        n = len(slots)
        if self.exact:
            return [(i, i + 1, 1) for i in range(n)]
        edges = [0, *(np.flatnonzero(slots[1:] != slots[:-1]) + 1).tolist(), n]
        cuts: list[tuple[int, int, int]] = []
        for start, end in pairwise(edges):
            each = end - start
            if cuts and cuts[-1][2] == each and each <= _SHORT:
                cuts[-1] = (cuts[-1][0], end, each)
            else:
                cuts.append((start, end, each))
        return cuts

    def _run(
        self, tokens: Ints, positions: Ints, slots: Ints, tables: Ints, each: int
    ) -> torch.Tensor:
        shape = (len(tokens) // each, each)
        blocks = int(positions.max()) // self.block_size + 1
        order = slots[::each]
        table = torch.from_numpy(tables[order, :blocks].astype(np.int64)).to(self._device)
        at = torch.from_numpy(positions.astype(np.int64)).to(self._device).view(shape)
        place = (table.gather(1, at // self.block_size), at % self.block_size)
        seen = torch.arange(blocks * self.block_size, device=self._device)
        mask = (seen <= at[..., None])[:, None]
        x = self._decoder.embed_tokens(torch.from_numpy(tokens).to(self._device).view(shape))
        for index, layer in enumerate(self._decoder.layers):
            attended = self._attend(layer, index, layer.input_layernorm(x), at, table, place, mask)
            x = x + attended
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self._decoder.norm(x).flatten(0, 1)

    def _attend(
        self,
        layer: Any,
        index: int,
        x: torch.Tensor,
        at: torch.Tensor,
        table: torch.Tensor,
        place: tuple[torch.Tensor, torch.Tensor],
        mask: torch.Tensor,
    ) -> torch.Tensor:
        own, s = layer.self_attn, self._shape
        cos, sin = self._cos[at][:, :, None], self._sin[at][:, :, None]
        q, k, v = (
            f(x).unflatten(-1, (-1, s.head_dim)) for f in (own.q_proj, own.k_proj, own.v_proj)
        )
        if hasattr(own, "q_norm"):
            q, k = own.q_norm(q), own.k_norm(k)
        self._keys[index][place] = _rotate(k, cos, sin)
        self._values[index][place] = v
        keys = self._keys[index][table].flatten(1, 2).transpose(1, 2)
        values = self._values[index][table].flatten(1, 2).transpose(1, 2)
        out = F.scaled_dot_product_attention(
            _rotate(q, cos, sin).transpose(1, 2),
            keys,
            values,
            attn_mask=mask,
            scale=s.scale,
            enable_gqa=True,
        )
        return own.o_proj(out.transpose(1, 2).flatten(2))

    def join(self, parts: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat(parts)

    @torch.no_grad()
    def sample(self, hidden: torch.Tensor, rows: Ints, draws: RowDraws) -> tuple[Ints, Floats]:
        head = self._model.get_output_embeddings()
        pieces = hidden.split(1) if self.exact else (hidden,)
        logits = torch.cat([head(piece) for piece in pieces]).float()
        logits = logits[torch.from_numpy(rows.astype(np.int64)).to(self._device)]
        size = len(rows)
        cuts = [slice(i, i + 1) for i in range(size)] if self.exact else [slice(0, size)]
        drawn = [draw_rows(logits[cut], draws.of(cut)) for cut in cuts]
        tokens, logprobs = (torch.cat(parts) for parts in zip(*drawn, strict=True))
        return tokens.int().cpu().numpy(), logprobs.cpu().numpy()
