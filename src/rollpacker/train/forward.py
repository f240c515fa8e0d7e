"""The forward pass of Qwen2, Qwen3 and Llama models over flat micro-batches.

It calls the modules of the transformers model (so adapters and rope variants are theirs) and
replaces only what padding would cost: attention gathers its rows from the flat tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from rollpacker.train.packing import MicroBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def hidden_states(
    model: PreTrainedModel, batch: MicroBatch, *, recompute: bool = False
) -> torch.Tensor:
    """Hidden states from which the response tokens are predicted, shape (T, H).

    ``recompute`` keeps only each layer's input for the backward pass.
    """
    decoder: Any = model.model
    x = decoder.embed_tokens(batch.tokens)
    cos, sin = decoder.rotary_emb(x[None], batch.positions[None])
    rope = cos[0, :, None], sin[0, :, None]
    for layer in decoder.layers:
        if recompute and torch.is_grad_enabled():
            x = checkpoint(_layer, layer, x, rope, batch, use_reentrant=False)
        else:
            x = _layer(layer, x, rope, batch)
    return decoder.norm(x[batch.sources])


def _layer(
    layer: Any, x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], batch: MicroBatch
) -> torch.Tensor:
    x = x + _attention(layer.self_attn, layer.input_layernorm(x), rope, batch)
    mlp = layer.mlp
    h = layer.post_attention_layernorm(x)
    return x + mlp.down_proj(mlp.act_fn(mlp.gate_proj(h)) * mlp.up_proj(h))


def _attention(
    attention: Any, h: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], batch: MicroBatch
) -> torch.Tensor:
    shape = (len(h), -1, attention.head_dim)
    q, k = attention.q_proj(h).view(shape), attention.k_proj(h).view(shape)
    v = attention.v_proj(h).view(shape)
    if hasattr(attention, "q_norm"):
        q, k = attention.q_norm(q), attention.k_norm(k)
    q, k = _rotate(q, *rope), _rotate(k, *rope)
    rows = batch.causal
    out = _attend(q, k, v, rows.gather, rows.gather, None, attention.scaling)[rows.scatter]
    if batch.prefix is not None and batch.prefix.queries.numel():
        p = batch.prefix
        more = _attend(q, k, v, p.queries, p.keys, p.mask, attention.scaling)[p.scatter]
        out = torch.cat((out, more))
    return attention.o_proj(out)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of x (N, heads, D); rotation by halves."""
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    queries: torch.Tensor,
    keys: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """Attention of gathered rows: output (cells, heads * D), causal where there is no mask."""
    out = F.scaled_dot_product_attention(
        _gather(q, queries),
        _gather(k, keys),
        _gather(v, keys),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out.transpose(1, 2).reshape(queries.numel(), -1)


def _gather(x: torch.Tensor, cells: torch.Tensor) -> torch.Tensor:
    """Rows of x (N, heads, D) as (S, heads, L, D)."""
    return x[cells].transpose(1, 2)
