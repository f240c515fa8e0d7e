"""Attention over the rows of a flat micro-batch, as one of the attentions of transformers.

Every model of transformers looks up its attention and its masks by one name
(``AttentionInterface``, ``AttentionMaskInterface``). Inside ``running`` a model computes one
sequence of all flat tokens, shape (1, N). Our attention gathers rows from them. In place of a mask
it gets ``_Rows``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function

from rollpacker.train.model.packing import CausalRows, MicroBatch, PrefixRows

_NAME = "rollpacker_rows"
_RUNNING: ContextVar[MicroBatch] = ContextVar("the running micro-batch")

Sees = Callable[[Any, Any, Any, Any], Any]
"""Transformers' mask function: whether a query sees a key, from broadcastable indices of sequence,
head, query and key."""


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """A micro-batch for layers with one kind of mask.

    Args:
        own: keys that a cell of ``batch.causal`` sees, shape (1, 1, L, L). None for those before
            it.
        prefix: keys that a query of ``batch.prefix`` sees, shape (S, 1, R, P + R).
    """

    batch: MicroBatch
    own: torch.Tensor | None
    prefix: torch.Tensor | None


@contextmanager
def running(configs: Iterable[Any], batch: MicroBatch) -> Iterator[None]:
    """Models of these configurations (parents first) attend within the rows of ``batch``."""
    kept = [(config, config._attn_implementation) for config in configs]
    token = _RUNNING.set(batch)
    try:
        for config, _ in kept:
            config._attn_implementation = _NAME
        yield
    finally:
        _RUNNING.reset(token)
        for config, own in kept:
            config._attn_implementation = own


def by_rows(mixer: torch.nn.Module) -> tuple[RemovableHandle, RemovableHandle]:
    """Let a module that mixes neighbours (a convolution, a recurrence) see rows inside ``running``.
    It has to be causal, as rows end in their padding. The returned handles undo it."""
    before = mixer.register_forward_pre_hook(_to_rows, with_kwargs=True)
    return before, mixer.register_forward_hook(_to_flat)


def _to_rows(_: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    batch = _RUNNING.get(None)
    if batch is None:
        return None
    rows = batch.causal
    if args:
        args = (pad(args[0][0], rows.gather, rows.scatter), *args[1:])
    else:
        flat = kwargs["hidden_states"][0]
        kwargs = kwargs | {"hidden_states": pad(flat, rows.gather, rows.scatter)}
    return args, kwargs | ({"attention_mask": None} if "attention_mask" in kwargs else {})


def _to_flat(_: Any, __: Any, output: Any) -> Any:
    batch = _RUNNING.get(None)
    if batch is None:
        return None
    if isinstance(output, tuple):
        return (_to_flat(_, __, output[0]), *output[1:])
    return unpad(output.flatten(0, 1), batch.causal.scatter)[None]


def _mask(*_: Any, mask_function: Sees = causal_mask_function, **options: Any) -> _Rows:
    """In place of transformers' mask. ``local_size`` is how far a window or chunk reaches."""
    batch = _RUNNING.get()
    near = options.get("local_size")
    causal = mask_function is causal_mask_function

    def needs_mask(longest: int) -> bool:
        return not causal and (near is None or near < longest)

    own, prefix = None, None if batch.prefix is None else batch.prefix.mask
    longest = batch.causal.gather.shape[1]
    if needs_mask(longest):
        places = torch.arange(longest, device=batch.tokens.device)[None]
        own = _seen(mask_function, places, places) & (places <= places[0, :, None])
    if _asks(batch.prefix) and needs_mask(batch.prefix.keys.shape[1]):
        prefix = batch.prefix.mask & _seen(mask_function, *_places(batch.prefix))
    return _Rows(batch, own, prefix)


def _seen(sees: Sees, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    first = queries.new_zeros(())
    return sees(first, first, queries[:, None, :, None], keys[:, None, None, :])


def _asks(rows: PrefixRows | None) -> TypeGuard[PrefixRows]:
    return rows is not None and rows.queries.numel() > 0


def _places(rows: PrefixRows) -> tuple[torch.Tensor, torch.Tensor]:
    count = rows.queries.shape[1]
    width = rows.keys.shape[1] - count
    prompts = rows.mask[:, 0, 0, :width].sum(-1)  # the first query sees all of its prompt
    queries = prompts[:, None] + torch.arange(count, device=prompts.device)
    before = torch.arange(width, device=prompts.device).expand(len(queries), -1)
    return queries, torch.cat((before, queries), dim=1)


def _attention(
    _: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: _Rows,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **__: Any,
) -> tuple[torch.Tensor, None]:
    how = {
        "scale": query.shape[-1] ** -0.5 if scaling is None else scaling,
        "softcap": softcap,
        "sinks": s_aux,
    }
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    batch = attention_mask.batch
    rows: CausalRows = batch.causal
    cells = rows.gather, rows.scatter
    wide = pad(q, *cells), pad(k, *cells), pad(v, *cells)
    out = unpad(_attend(*wide, attention_mask.own, **how).flatten(0, 1), rows.scatter)
    if _asks(p := batch.prefix):
        more = _attend(q[p.queries], k[p.keys], v[p.keys], attention_mask.prefix, **how)
        out = torch.cat((out, unpad(more.flatten(0, 1), p.scatter)))
    return out[None], None


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    dtype, length, width = q.dtype, q.shape[1], v.shape[-1]
    if sinks is not None:
        q, k, v, mask = _with_sink(q, k, v, mask, sinks / scale)
    if q.device.type == "cpu":
        # On a CPU, the backward pass of bfloat16 attention takes 1.6 times as long as float32's.
        q, k, v = q.float(), k.float(), v.float()
    shared = q.shape[2] != k.shape[2]
    if shared and (softcap is not None or (q.is_cuda and mask is not None)):
        # No fast kernel of CUDA takes a mask and shared heads together.
        k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for x in (k, v))
        shared = False
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if softcap is not None:
        out = _capped(q, k, v, mask, scale, softcap)
    else:
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=shared
        )
    return out.transpose(1, 2)[:, -length:, :, :width].to(dtype)


def _capped(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    cap: float,
) -> torch.Tensor:
    if mask is None:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    scores = torch.tanh((q @ k.transpose(2, 3)).float() * (scale / cap)) * cap
    weights = torch.softmax(scores.masked_fill(~mask, -torch.inf), dim=-1)
    return weights.to(q.dtype) @ v


def _with_sink(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scores: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Add a first key that every query gives ``scores`` (heads,), and that has no value.

    It takes its share of the softmax, as the learned sinks of gpt-oss do. An extra dimension of the
    heads carries the score, and is 0 in all other keys, so any kernel works. Without a mask the
    rows get a first query too, which keeps the triangle.
    """
    q = torch.cat((q, scores.to(q.dtype).expand(*q.shape[:2], -1)[..., None]), dim=-1)
    if mask is None:
        q = F.pad(q, (0, 0, 0, 0, 1, 0))
    else:
        mask = F.pad(mask, (1, 0), value=True)
    k = F.pad(k, (0, 1, 0, 0, 1, 0))
    k[:, 0, :, -1] = 1.0
    return q, k, F.pad(v, (0, 1, 0, 0, 1, 0)), mask


class _Pad(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, x: torch.Tensor, gather: torch.Tensor, scatter: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(scatter)
        ctx.tokens = len(x)
        return x.index_select(0, gather.flatten()).view(*gather.shape, *x.shape[1:])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (scatter,) = ctx.saved_tensors
        rows = grad.flatten(0, 1).index_select(0, scatter)
        if len(rows) < ctx.tokens:
            rows = torch.cat((rows, rows.new_zeros(ctx.tokens - len(rows), *rows.shape[1:])))
        return rows, None, None


class _Unpad(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, x: torch.Tensor, scatter: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(scatter)
        ctx.cells = len(x)
        return x.index_select(0, scatter)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (scatter,) = ctx.saved_tensors
        rows = grad.new_zeros(ctx.cells, *grad.shape[1:])
        return rows.index_copy_(0, scatter, grad), None


def pad(x: torch.Tensor, gather: torch.Tensor, scatter: torch.Tensor) -> torch.Tensor:
    """Rows (S, L, ...) of flat x (N, ...), of which the first ``len(scatter)`` tokens are used.
    Each token has one cell in ``scatter``. Gradients of other cells are ignored, as causal rows end
    in their padding."""
    return _Pad.apply(x, gather, scatter)  # pyright: ignore[reportReturnType]


def unpad(x: torch.Tensor, scatter: torch.Tensor) -> torch.Tensor:
    """The cells ``scatter`` (n,), all different, of x (cells, ...)."""
    return _Unpad.apply(x, scatter)  # pyright: ignore[reportReturnType]


AttentionInterface.register(_NAME, _attention)
AttentionMaskInterface.register(_NAME, _mask)
