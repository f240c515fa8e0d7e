"""Attention of single rows over blocked KV, compiled by numba: see ``forward`` for the layouts."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from rollpacker.engine.arithmetic import ELEMENTWISE, exp, total
from rollpacker.engine.mini.cpu.kernels import encode, inverse_rms
from rollpacker.engine.mini.cpu.lanes import COLUMNS, LANES, Matrix, Panel, madd


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
    """Write exp(score - max), zero from ``length`` to ``padded``; returns their sum.

    Unrounded, they take the place of the scores.
    """
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

    Args: ``group`` has as many elements as there are query heads; ``query`` their lanes from
    ``q0``; ``cache`` keys, values and the start of each block, in lanes; ``weights`` and ``lanes``
    are one buffer.
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
    """Write the rows' keys and values into the cache and their rotated queries into ``query``
    (rows * heads, head_dim rounded up); returns the longest length."""
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
    """Write the rows' keys and values, then attend; ``qkv`` (n, q + k + v columns)."""
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
