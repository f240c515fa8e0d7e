"""Building blocks of the CPU forward pass, compiled by numba and cached on disk.

numba notices changes of the file that holds a cached function, not of files that it calls into:
after an edit here, delete ``__pycache__`` before timing or testing callers.
"""
# ruff: noqa: ARG001, ARG005 - numba matches overloads by their arguments' names.

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import overload

from rollpacker.engine.arithmetic import ELEMENTWISE, SUMS, bits_float, exp, float_bits
from rollpacker.engine.mini.cpu.lanes import (
    COLUMNS,
    LANES,
    TILE_ROWS,
    Matrix,
    Panel,
    madd,
    madd_packed,
)

_LARGE = (0,) * TILE_ROWS[0]
_MIDDLE = (0,) * TILE_ROWS[1]
_ONE = (0,)


def encode(like: Any, value: Any) -> Any:
    """``value`` as the array ``like`` stores it: float32, or the bits of a bfloat16.

    Rounds to nearest even; NaN is none of its concern. Compiled code runs the overload below.
    """
    if like.dtype == np.float32:
        return np.float32(value)
    bits = int(np.float32(value).view(np.uint32))
    return np.uint16((bits + 0x7FFF + (bits >> 16 & 1)) >> 16)


def decode(value: Any) -> Any:
    """The float32 of a stored element. Compiled code runs the overload below."""
    if value.dtype == np.float32:
        return value
    return np.uint32(int(value) << 16).view(np.float32)


@overload(encode, inline="always")
def _encode(like, value):
    if like.dtype == types.float32:
        return lambda like, value: value

    def rounded(like, value):
        bits = float_bits(value)
        return np.uint16((bits + np.int32(0x7FFF) + ((bits >> np.int32(16)) & np.int32(1))) >> 16)

    return rounded


@overload(decode, inline="always")
def _decode(value):
    if value == types.float32:
        return lambda value: value
    return lambda value: bits_float(np.int32(value) << np.int32(16))


@njit(cache=True, nogil=True, error_model="numpy", fastmath=SUMS)
def inverse_rms(x: Any, size: int, eps: Any) -> Any:
    """One over the root mean square of the first ``size`` elements, in such an order."""
    result = np.float32(0.0)
    for i in range(size):
        result += x[i] * x[i]
    return np.float32(1.0) / np.sqrt(result / np.float32(size) + eps)


@njit(cache=True, nogil=True, error_model="numpy")
def interleave(a: Any, depth: int, rows: int) -> Any:
    """Rows ``a`` (rows, depth) as chunks ``[depth][row]`` of as many rows as the large tile."""
    size = len(_LARGE)
    out = np.empty(rows // size * size * depth, a.dtype)
    for r in range(len(out) // depth):
        base = r // size * size * depth + r % size
        for k in range(depth):
            out[base + k * size] = a[r, k]
    return out


@njit(cache=True, nogil=True, error_model="numpy")
def multiply(a: Any, w: Any, start: int, out: Any) -> None:
    """``out += a @ w`` for lanes ``a`` (rows, depth) and packed ``w`` of out's columns."""
    rows, depth = a.shape
    ld = out.shape[1]
    tiled = interleave(a, depth, rows)
    for first in range(0, ld, COLUMNS):
        base = start + first * depth
        panel = Panel(w, base, base + LANES, COLUMNS)
        r = 0
        while rows - r >= len(_LARGE):
            left, result = Matrix(tiled, r * depth, len(_LARGE)), Matrix(out, r * ld + first, ld)
            madd_packed(_LARGE, left, panel, result, depth)
            r += len(_LARGE)
        while rows - r >= len(_MIDDLE):
            left, result = Matrix(a, r * depth, depth), Matrix(out, r * ld + first, ld)
            madd(_MIDDLE, left, panel, result, depth)
            r += len(_MIDDLE)
        while r < rows:
            left, result = Matrix(a, r * depth, depth), Matrix(out, r * ld + first, ld)
            madd(_ONE, left, panel, result, depth)
            r += 1


@njit(cache=True, nogil=True, error_model="numpy", fastmath=ELEMENTWISE)
def normalise(x: Any, gain: Any, eps: Any, out: Any) -> None:
    """RMS norm of one row (Zhang & Sennrich, 2019)."""
    size = len(gain)
    factor = inverse_rms(x, size, eps)
    for i in range(size):
        out[i] = encode(out, x[i] * factor * gain[i])


@njit(cache=True, nogil=True, error_model="numpy", fastmath=ELEMENTWISE)
def gate(x: Any, inner: int, out: Any) -> None:
    """SwiGLU of one row: silu(x[:inner]) * x[inner:2 inner] (Shazeer, 2020)."""
    for i in range(inner):
        g = x[i]
        e = exp(-abs(g))
        sigmoid = (np.float32(1.0) if g >= 0 else e) / (np.float32(1.0) + e)
        out[i] = encode(out, g * sigmoid * x[inner + i])
