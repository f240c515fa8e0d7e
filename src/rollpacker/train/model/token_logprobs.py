"""Log-probabilities of chosen tokens, without the logits of a whole batch in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

_CHUNK_ELEMENTS = 1 << 25  # logits held at a time: 128 MB in float32
_PART_ELEMENTS = 1 << 23  # elements of an output embedding held at a time in float32: 32 MB

_CAPS = ("final_logit_softcapping", "logits_soft_cap")


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """From hidden states to logits: ``cap * tanh(scale * (hidden @ weight.T + bias) / cap)``.

    Args:
        weight: output embedding, shape (V, H).
        bias: shape (V,).
        scale: factor of the logits (Cohere, Granite, Falcon-H1, Muse).
        cap: bound of the logits (Gemma 2, RecurrentGemma), 0 for none.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    scale: float = 1.0
    cap: float = 0.0

    @classmethod
    def of(cls, model: Any) -> Head:
        """The head of a model, by transformers' names for its parts. ``layouts.check_head`` finds
        out whether there are others."""
        config = model.config.get_text_config()
        scale = getattr(config, "logit_scale", None) or 1.0
        for factor in ("lm_head_multiplier", "output_multiplier"):
            scale *= getattr(config, factor, None) or 1.0
        scale /= getattr(config, "logits_scaling", None) or 1.0
        caps = (getattr(config, name, None) for name in _CAPS)
        return cls(
            weight=model.get_output_embeddings().weight,
            bias=getattr(model.get_output_embeddings(), "bias", None),
            scale=float(scale),
            cap=float(next(filter(None, caps), 0.0)),
        )

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits (T, V), float32, of hidden states (T, H), without a gradient."""
        with torch.no_grad():
            return _head_logits(hidden, self.weight, self.bias, self)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        head: Head,
        temperature: float,
        rows: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.head, ctx.temperature, ctx.rows, ctx.kept = head, temperature, rows, None
        ctx.save_for_backward(hidden, weight, bias, targets)
        logprobs, entropies = [], []
        for h, t in zip(hidden.split(rows), targets.split(rows), strict=True):
            logits = _head_logits(h, weight, bias, head)
            slope = _slope(logits, head)
            if temperature != 1.0:
                logits /= temperature
            log_p = torch.log_softmax(logits, dim=-1)
            logprobs.append(log_p.gather(1, t[:, None])[:, 0])
            p = log_p.exp()
            entropies.append(-torch.linalg.vecdot(p, log_p))
            ctx.kept = (p, slope) if len(hidden) <= rows else None
        entropy = torch.cat(entropies)
        ctx.mark_non_differentiable(entropy)
        return torch.cat(logprobs), entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: torch.Tensor, _: torch.Tensor
    ) -> Any:
        hidden, weight, bias, targets = ctx.saved_tensors
        grad = grad * (ctx.head.scale / ctx.temperature)
        for_hidden, for_weight, for_bias = [], None, None
        parts = (x.split(ctx.rows) for x in (hidden, targets, grad))
        for h, t, g in zip(*parts, strict=True):
            p, slope = ctx.kept or _probabilities(h, weight, bias, ctx.head, ctx.temperature)
            d = p * -g[:, None]
            d.scatter_add_(1, t[:, None], g[:, None])
            if slope is not None:
                d.mul_(slope)
            if ctx.needs_input_grad[2]:
                part = d.sum(0)
                for_bias = part if for_bias is None else for_bias.add_(part)
            d = d.to(h.dtype)
            for_hidden.append(d @ weight)
            if ctx.needs_input_grad[1]:
                part = (d.T @ h).float()
                for_weight = part if for_weight is None else for_weight.add_(part)
        into = None if for_weight is None else for_weight.to(weight.dtype)
        into_bias = None if for_bias is None else for_bias.to(bias.dtype)
        return torch.cat(for_hidden), into, into_bias, None, None, None, None


def _logits(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """In float32 for all types. Rounded to bfloat16, logprobs would be off by 0.01 nats on average
    (SmolLM2-135M), up to 0.03 if no token is likely."""
    if hidden.dtype == torch.float32:
        return hidden @ weight.T
    if hidden.is_cuda:
        return torch.mm(hidden, weight.T, out_dtype=torch.float32)
    # A CPU has no such product, but two bfloat16 multiply exactly in float32. Parts avoid a copy.
    wide, rows = hidden.float(), max(1, _PART_ELEMENTS // weight.shape[1])
    logits = wide.new_empty(len(hidden), len(weight))
    for place in range(0, len(weight), rows):
        part = weight[place : place + rows]
        logits[:, place : place + rows] = wide @ part.float().T
    return logits


def _head_logits(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, head: Head
) -> torch.Tensor:
    logits = _logits(hidden, weight)
    if bias is not None:
        logits += bias.float()
    if head.scale != 1.0:
        logits *= head.scale
    return logits if not head.cap else logits.div_(head.cap).tanh_().mul_(head.cap)


def _slope(logits: torch.Tensor, head: Head) -> torch.Tensor | None:
    return None if not head.cap else 1.0 - (logits / head.cap).square_()


def _probabilities(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    head: Head,
    temperature: float,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    logits = _head_logits(hidden, weight, bias, head)
    slope = _slope(logits, head)
    if temperature != 1.0:
        logits /= temperature
    return torch.softmax(logits, dim=-1), slope


def token_logprobs(
    hidden: torch.Tensor,
    head: Head,
    targets: torch.Tensor,
    temperature: float,
    chunk_elements: int = _CHUNK_ELEMENTS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logprobs of ``targets`` (T,), int64, and entropies, in nats, both float32 (T,), from hidden
    states (T, H). Logits are divided by the sampling temperature, above 0. At most
    ``chunk_elements`` are held at a time. Entropies carry no gradient."""
    rows = max(1, chunk_elements // len(head.weight))
    return _TokenLogprobs.apply(  # pyright: ignore[reportReturnType]
        hidden, head.weight, head.bias, targets, head, temperature, rows
    )


def k3(logprobs: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Unbiased, non-negative estimate of the KL to the reference, per token (Schulman, 2020)."""
    difference = reference - logprobs
    return torch.exp(difference) - difference - 1.0
