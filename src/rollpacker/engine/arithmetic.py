"""Compiled arithmetic that kernels share: the bits of numbers, the exponential, sums. numba notices
changes of the file that holds a cached function, not of files that it calls. After an edit here,
delete ``__pycache__`` before timing or testing callers."""

# ruff: noqa: ARG001 - numba matches intrinsics by their arguments' names.

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

ELEMENTWISE = {"contract", "nsz"}
"""Fast-math flags of loops that write: the bits are the same on every path of the compiler."""
SUMS = {"reassoc", "contract", "nsz"}
"""Fast-math flags of loops that only read. A loop that writes has a second path, for arrays that
lie close together, which would sum in another order."""


def primitive(function: Any) -> Any:
    """An intrinsic without a static type, as callers do not pass its ``typing`` argument."""
    return intrinsic(function)


@primitive
def float_bits(typing: Any, value: Any) -> Any:
    """The bits of a float32 as int32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(32))

    return types.int32(types.float32), codegen


@primitive
def bits_float(typing: Any, value: Any) -> Any:
    """The float32 with these int32 bits."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), codegen


@njit(cache=True, nogil=True, error_model="numpy", fastmath=ELEMENTWISE)
def exp(x: Any) -> Any:
    """e to the x for x <= 0, relative error below 2e-7 (Cephes' polynomial), vectorisable."""
    x = max(x, np.float32(-87.0))
    n = np.floor(x * np.float32(1.44269504088896341) + np.float32(0.5))
    x = x - n * np.float32(0.693359375)
    x = x - n * np.float32(-2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * x + np.float32(1.3981999507e-3)
    p = p * x + np.float32(8.3334519073e-3)
    p = p * x + np.float32(4.1665795894e-2)
    p = p * x + np.float32(1.6666665459e-1)
    p = p * x + np.float32(5.0000001201e-1)
    p = p * x * x + x + np.float32(1.0)
    return p * bits_float((np.int32(n) + np.int32(127)) << np.int32(23))


@njit(cache=True, nogil=True, error_model="numpy", fastmath=SUMS)
def total(x: Any, size: int) -> Any:
    """Sum of the first ``size`` elements, in an order that depends on ``size`` alone."""
    result = np.float32(0.0)
    for i in range(size):
        result += x[i]
    return result
