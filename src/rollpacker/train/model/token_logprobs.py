"""Log-probabilities of chosen tokens, without the logits of a whole batch in memory."""

from __future__ import annotations

from typing import Any

import torch

_CHUNK_ELEMENTS = 1 << 25
"""Logits held at a time: 128 MB in float32."""
_PART_ELEMENTS = 1 << 23
"""Of an output embedding in another type, held at a time in float32: 32 MB."""


class _TokenLogprobs(torch.autograd.Function):
    """Forward keeps the probabilities of one chunk at most; backward recomputes the others."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
        rows: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.temperature, ctx.rows, ctx.kept = temperature, rows, None
        ctx.save_for_backward(hidden, weight, targets)
        logprobs, entropies = [], []
        for h, t in zip(hidden.split(rows), targets.split(rows), strict=True):
            log_p = _log_softmax(h, weight, temperature)
            logprobs.append(log_p.gather(1, t[:, None])[:, 0])
            p = log_p.exp()
            entropies.append(-torch.linalg.vecdot(p, log_p))
            ctx.kept = p if len(hidden) <= rows else None
        entropy = torch.cat(entropies)
        ctx.mark_non_differentiable(entropy)
        return torch.cat(logprobs), entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: torch.Tensor, _: torch.Tensor
    ) -> Any:
        hidden, weight, targets = ctx.saved_tensors
        grad = grad / ctx.temperature
        for_hidden, for_weight = [], None
        parts = (x.split(ctx.rows) for x in (hidden, targets, grad))
        for h, t, g in zip(*parts, strict=True):
            p = ctx.kept if ctx.kept is not None else _log_softmax(h, weight, ctx.temperature).exp()
            d = p * -g[:, None]
            d.scatter_add_(1, t[:, None], g[:, None])
            d = d.to(h.dtype)
            for_hidden.append(d @ weight)
            if ctx.needs_input_grad[1]:
                part = (d.T @ h).float()
                for_weight = part if for_weight is None else for_weight.add_(part)
        into = None if for_weight is None else for_weight.to(weight.dtype)
        return torch.cat(for_hidden), into, None, None, None


def _logits(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """In float32 whatever the type of both: rounded to bfloat16 they would be off by 0.03 nats in
    the mean, more than everything else that a sampler and a trainer differ by."""
    if hidden.dtype == torch.float32:
        return hidden @ weight.T
    if hidden.is_cuda:
        return torch.mm(hidden, weight.T, out_dtype=torch.float32)
    # A CPU has no such product; those of two bfloat16 are exact in float32. In parts, so that no
    # whole copy is made.
    wide, rows = hidden.float(), max(1, _PART_ELEMENTS // weight.shape[1])
    logits = wide.new_empty(len(hidden), len(weight))
    for place in range(0, len(weight), rows):
        part = weight[place : place + rows]
        logits[:, place : place + rows] = wide @ part.float().T
    return logits


def _log_softmax(hidden: torch.Tensor, weight: torch.Tensor, temperature: float) -> torch.Tensor:
    logits = _logits(hidden, weight)
    if temperature != 1.0:
        logits /= temperature
    return torch.log_softmax(logits, dim=-1)


def token_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    chunk_elements: int = _CHUNK_ELEMENTS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of ``targets`` and entropies, in nats, both float32 of shape (T,).

    Logits are divided by the sampling temperature, so that they are the sampler's. Entropies
    carry no gradient.

    Args:
        hidden: shape (T, H).
        weight: output embedding, shape (V, H).
        targets: shape (T,), int64.
        temperature: above 0.
        chunk_elements: logits held at a time.
    """
    rows = max(1, chunk_elements // len(weight))
    return _TokenLogprobs.apply(hidden, weight, targets, temperature, rows)  # pyright: ignore[reportReturnType]


def k3(logprobs: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Unbiased, non-negative estimate of the KL to the reference, per token (Schulman, 2020)."""
    difference = reference - logprobs
    return torch.exp(difference) - difference - 1.0
