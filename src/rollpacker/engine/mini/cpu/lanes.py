"""Vector primitives that numba lacks: a register-tiled multiply-add.

A tile multiplies a few rows of ``a`` by 32 columns of ``b`` with one fused multiply-add after the
other along the depth. An element's value does not depend on the number of rows beside it, so the
CPU path is bit-identical for every batch.
"""

# ruff: noqa: ARG001 - numba matches intrinsics by their arguments' names.

from __future__ import annotations

from typing import Any, NamedTuple

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils

from rollpacker.engine.arithmetic import primitive

LANES = 16  # Floats in one vector. Narrower machines split it in registers.
COLUMNS = 2 * LANES  # columns of one tile and of one panel of packed weights

_FEATURES = binding.get_host_cpu_features()
HAS_BF16_DOT = bool(_FEATURES.get("avx512bf16", False))
"""Whether the CPU multiplies pairs of bfloat16 (vdpbf16ps)."""
TILE_ROWS = (12, 4) if _FEATURES.get("avx512f", False) else (3, 2)
"""Rows of the large and the middle tile, as many accumulators as registers allow."""

_I32 = ir.IntType(32)
_I64 = ir.IntType(64)
_F32 = ir.FloatType()
_F32S = ir.VectorType(_F32, LANES)
_I32S = ir.VectorType(_I32, LANES)


class _BFloat(ir.Type):
    def _to_string(self) -> str:
        return "bfloat"


_BF16S = ir.VectorType(_BFloat(), COLUMNS)


def _splat(builder: ir.IRBuilder, value: Any, vector: ir.VectorType) -> Any:
    empty = ir.Constant(vector, ir.Undefined)
    first = builder.insert_element(empty, value, _I32(0))
    zeros = ir.Constant(ir.VectorType(_I32, LANES), [0] * LANES)
    return builder.shuffle_vector(first, empty, zeros)


def _multiply_add(builder: ir.IRBuilder, a: Any, b: Any, c: Any) -> Any:
    """``a * b + c`` on floats, or on pairs of bfloat16 held in 32-bit lanes."""
    if a.type == _F32S:
        kind = ir.FunctionType(_F32S, [_F32S, _F32S, _F32S])
        fma = cgutils.get_or_insert_function(builder.module, kind, "llvm.fma.v16f32")
        return builder.call(fma, [a, b, c])
    kind = ir.FunctionType(_F32S, [_F32S, _BF16S, _BF16S])
    name = "llvm.x86.avx512bf16.dpbf16ps.512"
    dot = cgutils.get_or_insert_function(builder.module, kind, name)
    return builder.call(dot, [c, builder.bitcast(a, _BF16S), builder.bitcast(b, _BF16S)])


class Matrix(NamedTuple):
    """A matrix from element ``start`` of ``data`` on. Its rows are ``stride`` apart."""

    data: Any
    start: Any
    stride: Any


class Panel(NamedTuple):
    """A panel of 32 columns. Its halves start at two elements, and its rows are ``stride``
    apart."""

    data: Any
    first: Any
    second: Any
    stride: Any


class _Tile:
    def __init__(self, builder: ir.IRBuilder, rows: int, depth: Any) -> None:
        self.builder = builder
        self.rows = rows
        self.depth = depth

    def pointer(self, base: Any, index: Any, vector: ir.VectorType) -> Any:
        return self.builder.bitcast(self.builder.gep(base, [index]), vector.as_pointer())

    def starts(self, first: Any, apart: Any) -> list[Any]:
        b = self.builder
        return [b.add(first, b.mul(_I64(r), apart)) for r in range(self.rows)]

    def corners(self, c: Matrix) -> list[Any]:
        b = self.builder
        starts = self.starts(c.start, c.stride)
        return [
            self.pointer(c.data, b.add(s, _I64(half)), _F32S) for s in starts for half in (0, LANES)
        ]

    def emit(self, a: Any, starts: list[Any], step: Any, b: Panel, sums: list[Any]) -> list[Any]:
        builder = self.builder
        scalar = a.type.pointee
        vector = _F32S if scalar == _F32 else _I32S
        before = builder.block
        body = builder.append_basic_block("tile")
        after = builder.append_basic_block("tile.end")
        builder.branch(body)
        builder.position_at_end(body)
        k = builder.phi(_I64)
        k.add_incoming(_I64(0), before)
        phis = [builder.phi(_F32S) for _ in sums]
        for phi, start in zip(phis, sums, strict=True):
            phi.add_incoming(start, before)
        row = builder.mul(k, b.stride)
        columns = [
            builder.load(self.pointer(b.data, builder.add(start, row), vector), align=4)
            for start in (b.first, b.second)
        ]
        along = builder.mul(k, step)
        results = []
        for r in range(self.rows):
            element = builder.load(builder.gep(a, [builder.add(starts[r], along)]))
            value = _splat(builder, element, vector)
            for half, column in enumerate(columns):
                results.append(_multiply_add(builder, value, column, phis[2 * r + half]))
        following = builder.add(k, _I64(1))
        k.add_incoming(following, body)
        for phi, result in zip(phis, results, strict=True):
            phi.add_incoming(result, body)
        builder.cbranch(builder.icmp_signed("<", following, self.depth), body, after)
        builder.position_at_end(after)
        return results


def _madd(rows: Any, a: Any, b: Any, c: Any, *, packed: bool) -> Any:
    signature = types.void(rows, a, b, c, types.int64)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def taken(place: int, kind: type[Any]) -> Any:
            types_ = signature.args[place].types
            values = cgutils.unpack_tuple(builder, args[place])
            data = context.make_array(types_[0])(context, builder, values[0]).data
            numbers = zip(values[1:], types_[1:], strict=True)
            return kind(data, *(context.cast(builder, n, t, types.int64) for n, t in numbers))

        left, right, out = taken(1, Matrix), taken(2, Panel), taken(3, Matrix)
        tile = _Tile(builder, rows.count, args[4])
        starts = tile.starts(left.start, _I64(1) if packed else left.stride)
        step = left.stride if packed else _I64(1)
        corners = tile.corners(out)
        sums = [builder.load(p, align=4) for p in corners]
        sums = tile.emit(left.data, starts, step, right, sums)
        for pointer, value in zip(corners, sums, strict=True):
            builder.store(value, pointer, align=4)
        return context.get_dummy_value()

    return signature, codegen


@primitive
def madd(typing, rows, a, b, c, depth):
    """``c[r, 0:32] += sum_k a[r, k] * b[k, 0:32]`` for ``len(rows)`` rows, k below ``depth``.

    ``a`` and ``c`` are each a ``Matrix``, ``b`` is a ``Panel``. All count elements of contiguous
    arrays. ``a`` and ``b`` hold float32, or int32 lanes of two bfloat16 neighbours along the depth.
    ``c`` holds float32.
    """
    return _madd(rows, a, b, c, packed=False)


@primitive
def madd_packed(typing, rows, a, b, c, depth):
    """``madd`` with ``a[r, k]`` at ``start + k * stride + r``, so one address serves many rows."""
    return _madd(rows, a, b, c, packed=True)
