"""Building blocks of the CPU forward pass, compiled by numba and cached on disk. numba notices
changes of the file that holds a cached function, not of files that it calls. After an edit here,
delete ``__pycache__`` before timing or testing callers."""

# ruff: noqa: ARG001, ARG005 - numba matches overloads by their arguments' names.
from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import overload

from rollpacker.engine.arithmetic import ELEMENTWISE, SUMS, bits_float, exp, float_bits, total
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
    """``value`` as the array ``like`` stores it: float32, or the bits of a bfloat16. Rounds to
    nearest even, and does not handle NaN. Compiled code runs the overload below."""
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
    """One over the root mean square of the first ``size`` elements, in an order that depends on it
    alone."""
    result = np.float32(0.0)
    for i in range(size):
        result += x[i] * x[i]
    return np.float32(1.0) / np.sqrt(result / np.float32(size) + eps)


@njit(cache=True, nogil=True, error_model="numpy")
def interleave(a: Any, depth: int, rows: int) -> Any:
    """Rows ``a`` (rows, depth) as chunks ``[depth][row]`` of the large tile's number of rows."""
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


@njit(cache=True, nogil=True, error_model="numpy", fastmath=ELEMENTWISE)
def rotate(x: Any, gain: Any, eps: Any, cos: Any, sin: Any, scale: Any, out: Any) -> None:
    """Rotary embedding of one head (Su et al., 2021), after an RMS norm if ``gain`` is given."""
    size = len(x)
    half = size // 2
    if len(gain):
        factor = inverse_rms(x, size, eps)
        for i in range(size):
            x[i] = x[i] * factor * gain[i]
    for i in range(half):
        low, high = x[i], x[i + half]
        out[i] = (low * cos[i] - high * sin[i]) * scale
        out[i + half] = (high * cos[i + half] + low * sin[i + half]) * scale


@njit(cache=True, nogil=True, error_model="numpy")
def write_kv(k: Any, v: Any, keys: Any, values: Any, block: int, t: int, p: int) -> None:
    """Store one head's key and value of token ``t`` of a block that starts at ``block``."""
    padded = (len(k) + COLUMNS - 1) // COLUMNS * COLUMNS
    for d in range(len(k)):
        keys[block + (d // p) * LANES * p + t * p + d % p] = encode(keys, k[d])
        values[block + (t // p) * padded * p + d * p + t % p] = encode(values, v[d])


@njit(cache=True, nogil=True, error_model="numpy", fastmath=ELEMENTWISE)
def softmax(scores: Any, length: int, padded: int, out: Any) -> Any:
    """Write exp(score - max), and zeros from ``length`` to ``padded``. Returns their sum. The
    unrounded values replace the scores."""
    top = scores[0]
    for t in range(length):
        top = max(top, scores[t])
    for t in range(length):
        scores[t] = exp(scores[t] - top)
    for t in range(length):
        out[t] = encode(out, scores[t])
    for t in range(length, padded):
        out[t] = encode(out, np.float32(0.0))
    return total(scores, length)


@njit(cache=True, nogil=True, error_model="numpy", fastmath=ELEMENTWISE)
def attend(
    group: Any,
    query: Any,
    q0: int,
    cache: Any,
    length: int,
    scores: Any,
    weights: Any,
    lanes: Any,
    result: Any,
) -> None:
    """Attention of one row's query heads over one key-value head's tokens up to ``length``.

    Args:
        group: has one element for each query head.
        query: lanes of the queries, from ``q0`` on.
        cache: keys, values and the start of each block, in lanes.
        weights, lanes: two views of one buffer.
    """
    keys, values, bases = cache
    padded = result.shape[1]
    p = weights.shape[1] // lanes.shape[1]
    depth = padded // p
    blocks = (length + LANES - 1) // LANES
    width = scores.shape[1]
    for g in range(len(group)):
        for t in range((blocks + 1) // 2 * COLUMNS):
            scores[g, t] = np.float32(0.0)
        for d in range(padded):
            result[g, d] = np.float32(0.0)
    for i in range(0, blocks, 2):
        after = bases[min(i + 1, blocks - 1)]
        panel = Panel(keys, bases[i], after, LANES)
        madd(group, Matrix(query, q0, depth), panel, Matrix(scores, i * LANES, width), depth)
    for g in range(len(group)):
        mass = softmax(scores[g], length, blocks * LANES, weights[g])
        scores[g, 0] = np.float32(1.0) / mass
    for i in range(blocks):
        for d in range(0, padded, COLUMNS):
            seen = Matrix(lanes, i * LANES // p, lanes.shape[1])
            panel = Panel(values, bases[i] + d, bases[i] + d + LANES, padded)
            madd(group, seen, panel, Matrix(result, d, padded), LANES // p)
    for g in range(len(group)):
        factor = scores[g, 0]
        for d in range(padded):
            result[g, d] *= factor


@njit(cache=True, nogil=True, error_model="numpy")
def place(
    qkv: Any, query: Any, batch: Any, cache: Any, layer: int, head_dim: int, norms: Any, rope: Any
) -> int:
    """Write the rows' keys and values into the cache and their rotated queries into ``query`` (rows
    * heads, head_dim rounded up). Returns the longest length."""
    positions, slots, tables = batch
    keys, values, key_lanes, _, pool, kv_heads = cache
    cos, sin, eps, scale = rope
    heads = len(query) // len(positions)
    p = keys.size // key_lanes.size
    size = query.shape[1] * LANES
    rotated = np.empty(head_dim, np.float32)
    one = np.float32(1.0)
    longest = 0
    for i in range(len(positions)):
        at = positions[i]
        longest = max(longest, at + 1)
        for h in range(heads):
            q = qkv[i, h * head_dim : (h + 1) * head_dim]
            rotate(q, norms[0], eps, cos[at], sin[at], scale, rotated)
            for d in range(head_dim):
                query[i * heads + h, d] = encode(query, rotated[d])
        block = (layer * pool + tables[slots[i], at // LANES]) * kv_heads
        for h in range(kv_heads):
            k = qkv[i, (heads + h) * head_dim : (heads + h + 1) * head_dim]
            first = (heads + kv_heads + h) * head_dim
            v = qkv[i, first : first + head_dim]
            rotate(k, norms[1], eps, cos[at], sin[at], one, rotated)
            write_kv(rotated, v, keys, values, (block + h) * size, at % LANES, p)
    return longest


@njit(cache=True, nogil=True, error_model="numpy")
def attention_layer(
    qkv: Any,
    attended: Any,
    batch: Any,
    cache: Any,
    layer: int,
    group: Any,
    head_dim: int,
    norms: Any,
    rope: Any,
) -> None:
    """Write the rows' keys and values, then attend. ``qkv`` is (n, q + k + v columns)."""
    positions, slots, tables = batch
    keys, _, key_lanes, value_lanes, pool, kv_heads = cache
    heads = kv_heads * len(group)
    p = keys.size // key_lanes.size
    padded = (head_dim + COLUMNS - 1) // COLUMNS * COLUMNS
    query = np.zeros((len(positions) * heads, padded), attended.dtype)
    longest = place(qkv, query, batch, cache, layer, head_dim, norms, rope)
    width = (longest + 2 * COLUMNS - 1) // COLUMNS * COLUMNS
    scores = np.empty((len(group), width), np.float32)
    weights = np.empty((len(group), width), attended.dtype)
    lanes = weights.view(key_lanes.dtype)
    query_lanes = query.view(key_lanes.dtype)
    result = np.empty((len(group), padded), np.float32)
    bases = np.empty(width // LANES, np.int64)
    for i in range(len(positions)):
        length = positions[i] + 1
        for h in range(kv_heads):
            for t in range((length + LANES - 1) // LANES):
                block = (layer * pool + tables[slots[i], t]) * kv_heads + h
                bases[t] = block * (padded * LANES // p)
            first = (i * heads + h * len(group)) * (padded // p)
            seen = key_lanes, value_lanes, bases
            attend(group, query_lanes, first, seen, length, scores, weights, lanes, result)
            for g in range(len(group)):
                column = (h * len(group) + g) * head_dim
                for d in range(head_dim):
                    attended[i, column + d] = encode(attended, result[g, d])


@njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract"})
def start_rows(out: Any, bias: Any, rows: int) -> None:
    """Fill the rows with the bias, or zeros without one."""
    for i in range(rows):
        for j in range(out.shape[1]):
            out[i, j] = np.float32(0.0)
        for j in range(len(bias)):
            out[i, j] = bias[j]


@njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract"})
def add_bias(x: Any, bias: Any, rows: int) -> None:
    """Add the bias, if there is one, to the residual rows."""
    for i in range(rows):
        for j in range(len(bias)):
            x[i, j] += bias[j]


@njit(cache=True, nogil=True, error_model="numpy")
def forward(
    tokens: Any,
    batch: Any,
    keep: Any,
    embed: Any,
    packed: Any,
    starts: Any,
    vectors: Any,
    splits: Any,
    sizes: Any,
    group: Any,
    cache: Any,
    rope: Any,
) -> Any:
    """Run rows through the model. Returns the normed last hidden states of the rows ``keep``.

    Args:
        tokens: (n,).
        batch: positions (n,), slots (n,) and the blocks of each sequence (slots, blocks).
        packed: all weight panels. Layer l's four matrices start at ``starts[l]``.
        vectors: norms and biases of each layer, cut at ``splits``.
        sizes: (hidden, head_dim, qkv columns, ffn, layers).
        rope: cosines, sines, the norms' epsilon and the scale of queries.
    """
    hidden, head_dim, qkv_columns, inner, layers = sizes
    n, eps = len(tokens), rope[2]
    x = np.zeros((n, (hidden + COLUMNS - 1) // COLUMNS * COLUMNS), np.float32)
    normed = np.zeros((n, (hidden + 1) // 2 * 2), embed.dtype)
    normed_lanes = normed.view(packed.dtype)
    qkv = np.empty((n, (qkv_columns + COLUMNS - 1) // COLUMNS * COLUMNS), np.float32)
    width = head_dim * len(group) * cache[5]
    attended = np.zeros((n, (width + 1) // 2 * 2), embed.dtype)
    attended_lanes = attended.view(packed.dtype)
    up = np.empty((n, (2 * inner + COLUMNS - 1) // COLUMNS * COLUMNS), np.float32)
    gated = np.zeros((n, (inner + 1) // 2 * 2), embed.dtype)
    gated_lanes = gated.view(packed.dtype)
    for i in range(n):
        for j in range(hidden):
            x[i, j] = decode(embed[tokens[i], j])
    for layer in range(layers):
        own = vectors[layer]
        at = starts[layer]
        for i in range(n):
            normalise(x[i], own[: splits[0]], eps, normed[i])
        start_rows(qkv, own[splits[0] : splits[1]], n)
        multiply(normed_lanes, packed, at[0], qkv)
        norms = (own[splits[1] : splits[2]], own[splits[2] : splits[3]])
        attention_layer(qkv, attended, batch, cache, layer, group, head_dim, norms, rope)
        add_bias(x, own[splits[3] : splits[4]], n)
        multiply(attended_lanes, packed, at[1], x)
        for i in range(n):
            normalise(x[i], own[splits[4] : splits[5]], eps, normed[i])
        start_rows(up, own[splits[5] : splits[6]], n)
        multiply(normed_lanes, packed, at[2], up)
        for i in range(n):
            gate(up[i], inner, gated[i])
        add_bias(x, own[splits[6] : splits[7]], n)
        multiply(gated_lanes, packed, at[3], x)
    out = np.zeros((len(keep), normed.shape[1]), embed.dtype)
    for i in range(len(keep)):
        normalise(x[keep[i]], vectors[layers, : splits[0]], eps, out[i])
    return out


@njit(cache=True, nogil=True, error_model="numpy")
def project(hidden: Any, packed: Any, start: int, columns: int) -> Any:
    """Logits (m, ``columns`` rounded up to 32) of hidden states (m, hidden)."""
    lanes = hidden.view(packed.dtype)
    out = np.zeros((len(hidden), (columns + COLUMNS - 1) // COLUMNS * COLUMNS), np.float32)
    multiply(lanes, packed, start, out)
    return out
