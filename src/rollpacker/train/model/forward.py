"""The forward pass of Qwen2, Qwen3 and Llama models over flat micro-batches.

It calls the modules of the transformers model (so adapters and rope variants are theirs) and
replaces only what padding would cost: attention gathers its rows from the flat tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from rollpacker.train.model.kernels import pad, rms_norm, rotate, unpad
from rollpacker.train.model.packing import MicroBatch
from rollpacker.train.model.token_logprobs import token_logprobs

if TYPE_CHECKING:
    from transformers import PreTrainedModel


Rope = tuple[torch.Tensor, torch.Tensor]
RunLayer = Callable[[Any, torch.Tensor, Rope, MicroBatch, bool], torch.Tensor]
"""From a decoder layer, its input (N, H), cosines and sines, the batch, and whether to recompute
activations for the backward pass, to the layer's output."""


def response_logprobs(
    model: Any,
    batch: MicroBatch,
    temperature: float,
    recompute: bool,
    run: RunLayer | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies of the sampled tokens, as ``token_logprobs.token_logprobs``.

    ``recompute`` and ``run`` are those of ``hidden_states``.
    """
    hidden = hidden_states(model, batch, recompute=recompute, run=run)
    return token_logprobs(hidden, model.lm_head.weight, batch.targets, temperature)


def hidden_states(
    model: PreTrainedModel,
    batch: MicroBatch,
    *,
    recompute: bool = False,
    run: RunLayer | None = None,
) -> torch.Tensor:
    """Hidden states from which the sampled tokens are predicted, shape (T, H).

    ``recompute`` keeps only each layer's input for the backward pass; ``run`` is what runs a
    layer (``run_layer``).
    """
    run = run or run_layer
    decoder: Any = model.model
    x = decoder.embed_tokens(batch.tokens)
    cos, sin = decoder.rotary_emb(x[None], batch.positions[None])
    half = sin.shape[-1] // 2
    rope = cos[0, :, None], sin[0, :, None, :half].contiguous()
    for layer in decoder.layers:
        x = run(layer, x, rope, batch, recompute)
    return _norm(decoder.norm, x[batch.sources])


def run_layer(
    layer: Any, x: torch.Tensor, rope: Rope, batch: MicroBatch, recompute: bool
) -> torch.Tensor:
    """One decoder layer over flat tokens, shape (N, H)."""
    if recompute and torch.is_grad_enabled():
        return checkpoint(
            _layer, layer, x, rope, batch, use_reentrant=False, preserve_rng_state=False
        )  # pyright: ignore[reportReturnType]
    return _layer(layer, x, rope, batch)


def _norm(norm: Any, x: torch.Tensor) -> torch.Tensor:
    return rms_norm(x, norm.weight, norm.variance_epsilon)


def _layer(layer: Any, x: torch.Tensor, rope: Rope, batch: MicroBatch) -> torch.Tensor:
    x = x + _attention(layer.self_attn, _norm(layer.input_layernorm, x), rope, batch)
    mlp = layer.mlp
    h = _norm(layer.post_attention_layernorm, x)
    return x + mlp.down_proj(mlp.act_fn(mlp.gate_proj(h)) * mlp.up_proj(h))


def _attention(attention: Any, h: torch.Tensor, rope: Rope, batch: MicroBatch) -> torch.Tensor:
    shape = (len(h), -1, attention.head_dim)
    q, k = attention.q_proj(h).view(shape), attention.k_proj(h).view(shape)
    v = attention.v_proj(h).view(shape)
    if hasattr(attention, "q_norm"):
        q, k = _norm(attention.q_norm, q), _norm(attention.k_norm, k)
    q, k = rotate(q, *rope), rotate(k, *rope)
    rows = batch.causal
    cells = rows.gather, rows.scatter
    wide = pad(q, *cells), pad(k, *cells), pad(v, *cells)
    out = unpad(_attend(*wide, None, attention.scaling), rows.scatter)
    if batch.prefix is not None and batch.prefix.queries.numel():
        p = batch.prefix
        more = _attend(q[p.queries], k[p.keys], v[p.keys], p.mask, attention.scaling)
        out = torch.cat((out, unpad(more, p.scatter)))
    return attention.o_proj(out)


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """Attention of rows (S, L, heads, D), causal without a mask; output (S * L, heads * D)."""
    dtype = q.dtype
    if q.device.type == "cpu":
        # The backward of bfloat16 attention is 1.6 times as slow as that of float32 there.
        q, k, v = q.float(), k.float(), v.float()
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return out.transpose(1, 2).reshape(q.shape[0] * q.shape[1], -1).to(dtype)
