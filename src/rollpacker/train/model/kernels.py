"""Elementwise parts of the forward pass with hand-written gradients.

Autograd keeps and visits every intermediate of a norm or a rotation; on small models that
costs as much as the matrix products. Formulas and rounding are those of transformers' modules.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> torch.Tensor:
        wide = x.float()
        scale = torch.linalg.vecdot(wide, wide).div_(x.shape[-1]).add_(epsilon).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale[..., None]).to(x.dtype) * weight

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, scale = ctx.saved_tensors
        unit = x.float() * scale[..., None]
        wide = grad.float()
        for_weight = None
        if ctx.needs_input_grad[1]:
            for_weight = (wide * unit).flatten(0, -2).sum(0).to(weight.dtype)
        inner = wide * weight
        along = torch.linalg.vecdot(inner, unit).div_(x.shape[-1])
        for_x = inner.addcmul_(unit, along[..., None], value=-1.0).mul_(scale[..., None])
        return for_x.to(x.dtype), for_weight, None


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin, 1.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        cos, sin = ctx.saved_tensors
        return _turn(grad, cos, sin, -1.0), None, None


def _turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sign: float) -> torch.Tensor:
    half = x.shape[-1] // 2
    out = x * cos
    out[..., :half].addcmul_(x[..., half:], sin, value=-sign)
    out[..., half:].addcmul_(x[..., :half], sin, value=sign)
    return out


class _Pad(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, x: torch.Tensor, gather: torch.Tensor, scatter: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(scatter)
        ctx.tokens = len(x)
        return x.index_select(0, gather.flatten()).view(*gather.shape, *x.shape[1:])

    @staticmethod
    @once_differentiable
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
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (scatter,) = ctx.saved_tensors
        rows = grad.new_zeros(ctx.cells, *grad.shape[1:])
        return rows.index_copy_(0, scatter, grad), None


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """RMS norm over the last axis, computed in float32 (Zhang and Sennrich, 2019)."""
    return _RMSNorm.apply(x, weight, epsilon)  # pyright: ignore[reportReturnType]


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding by halves (Su et al., 2021): x (N, heads, D), cos (N, 1, D).

    ``sin`` is the first half of its table, shape (N, 1, D / 2): both halves are equal.
    """
    return _Rotate.apply(x, cos, sin)  # pyright: ignore[reportReturnType]


def pad(x: torch.Tensor, gather: torch.Tensor, scatter: torch.Tensor) -> torch.Tensor:
    """Rows (S, L, ...) of flat x (N, ...), of which the first ``len(scatter)`` tokens are used.

    Each of those is gathered into the one cell that ``scatter`` names; the gradient of any other
    cell is not looked at, which is right because causal rows end in their padding.
    """
    return _Pad.apply(x, gather, scatter)  # pyright: ignore[reportReturnType]


def unpad(x: torch.Tensor, scatter: torch.Tensor) -> torch.Tensor:
    """The cells ``scatter`` (n,), all different, of x (cells, ...)."""
    return _Unpad.apply(x, scatter)  # pyright: ignore[reportReturnType]
