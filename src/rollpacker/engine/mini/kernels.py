"""The CPU forward pass and sampler, compiled by numba and cached on disk.

A *row* is one token at one position of one sequence. All rows of a call run together: each layer
first writes their keys and values, then each row attends to the tokens up to its own position, so
prompts and decoding sequences mix freely and nothing is padded. Every row is computed by itself
in a fixed order of operations: results do not depend on what else is in the batch.

Layouts, with P = 1 for float32 and P = 2 for bfloat16 (neighbours along the reduced dimension
share a 32-bit lane): weights ``[panel of 32 columns][depth / P][32][P]``; keys of a block of 16
tokens ``[kv head][head dim / P][16][P]``; values ``[kv head][16 / P][head dim][P]``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import overload

from rollpacker.engine.mini.lanes import (
    COLUMNS,
    LANES,
    TILE_ROWS,
    bits_float,
    float_bits,
    madd,
    madd_packed,
)

_SUMS = {"reassoc", "contract", "nsz", "arcp"}
_LARGE = (0,) * TILE_ROWS[0]
_MIDDLE = (0,) * TILE_ROWS[1]
_ONE = (0,)
_CHUNK = 256


def encode(like: Any, value: float) -> Any:
    """``value`` as the array ``like`` stores it: float32, or the bits of a bfloat16."""
    raise NotImplementedError


def decode(value: Any) -> float:
    """The float32 of a stored element."""
    raise NotImplementedError


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


@njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract", "nsz"})
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


@njit(cache=True, nogil=True, error_model="numpy")
def interleave(a: Any, depth: int, rows: int) -> Any:
    """Rows ``a`` (rows, depth) as chunks ``[depth][rows of the chunk]`` of the large tile's size."""
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
        r = 0
        while rows - r >= len(_LARGE):
            madd_packed(
                _LARGE,
                tiled,
                r * depth,
                len(_LARGE),
                w,
                base,
                base + LANES,
                COLUMNS,
                out,
                r * ld + first,
                ld,
                depth,
            )
            r += len(_LARGE)
        while rows - r >= len(_MIDDLE):
            madd(
                _MIDDLE,
                a,
                r * depth,
                depth,
                w,
                base,
                base + LANES,
                COLUMNS,
                out,
                r * ld + first,
                ld,
                depth,
            )
            r += len(_MIDDLE)
        while r < rows:
            madd(
                _ONE,
                a,
                r * depth,
                depth,
                w,
                base,
                base + LANES,
                COLUMNS,
                out,
                r * ld + first,
                ld,
                depth,
            )
            r += 1


@njit(cache=True, nogil=True, error_model="numpy", fastmath=_SUMS)
def normalise(x: Any, gain: Any, eps: Any, out: Any) -> None:
    """RMS norm of one row (Zhang & Sennrich, 2019)."""
    size = len(gain)
    total = np.float32(0.0)
    for i in range(size):
        total += x[i] * x[i]
    factor = np.float32(1.0) / np.sqrt(total / np.float32(size) + eps)
    for i in range(size):
        out[i] = encode(out, x[i] * factor * gain[i])


@njit(cache=True, nogil=True, error_model="numpy", fastmath=_SUMS)
def rotate(x: Any, gain: Any, eps: Any, cos: Any, sin: Any, scale: Any, out: Any) -> None:
    """Rotary embedding of one head (Su et al., 2021), after an RMS norm if ``gain`` is given."""
    size = len(x)
    half = size // 2
    if len(gain):
        total = np.float32(0.0)
        for i in range(size):
            total += x[i] * x[i]
        factor = np.float32(1.0) / np.sqrt(total / np.float32(size) + eps)
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


@njit(cache=True, nogil=True, error_model="numpy", fastmath=_SUMS)
def softmax(scores: Any, length: int, padded: int, out: Any) -> Any:
    """Write exp(score - max), zero from ``length`` to ``padded``; returns their sum."""
    top = scores[0]
    for t in range(length):
        top = max(top, scores[t])
    total = np.float32(0.0)
    for t in range(length):
        weight = exp(scores[t] - top)
        total += weight
        out[t] = encode(out, weight)
    for t in range(length, padded):
        out[t] = encode(out, np.float32(0.0))
    return total


@njit(cache=True, nogil=True, error_model="numpy", fastmath=_SUMS)
def attend(
    group: Any,
    query: Any,
    q0: int,
    keys: Any,
    values: Any,
    bases: Any,
    length: int,
    scores: Any,
    weights: Any,
    lanes: Any,
    result: Any,
) -> None:
    """Attention of one row's query heads over one key-value head's tokens up to ``length``.

    Args: ``group`` has as many elements as there are query heads; ``query`` their lanes from
    ``q0``; ``bases`` the start of each block in lanes; ``weights`` and ``lanes`` are one buffer.
    """
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
        madd(group, query, q0, depth, keys, bases[i], after, LANES, scores, i * LANES, width, depth)
    for g in range(len(group)):
        total = softmax(scores[g], length, blocks * LANES, weights[g])
        scores[g, 0] = np.float32(1.0) / total
    for i in range(blocks):
        for d in range(0, padded, COLUMNS):
            madd(
                group,
                lanes,
                i * LANES // p,
                lanes.shape[1],
                values,
                bases[i] + d,
                bases[i] + d + LANES,
                padded,
                result,
                d,
                padded,
                LANES // p,
            )
    for g in range(len(group)):
        factor = scores[g, 0]
        for d in range(padded):
            result[g, d] *= factor


@njit(cache=True, nogil=True, error_model="numpy", fastmath=_SUMS)
def gate(x: Any, inner: int, out: Any) -> None:
    """SwiGLU of one row: silu(x[:inner]) * x[inner:2 inner] (Shazeer, 2020)."""
    for i in range(inner):
        g = x[i]
        e = exp(-abs(g))
        sigmoid = (np.float32(1.0) if g >= 0 else e) / (np.float32(1.0) + e)
        out[i] = encode(out, g * sigmoid * x[inner + i])


@njit(cache=True, nogil=True, error_model="numpy")
def attention_layer(
    qkv: Any,
    attended: Any,
    slots: Any,
    positions: Any,
    tables: Any,
    cache: Any,
    layer: int,
    group: Any,
    head_dim: int,
    norms: Any,
    eps: Any,
    rope: Any,
    scale: Any,
) -> None:
    """Write the rows' keys and values, then attend; ``qkv`` (n, q + k + v columns)."""
    keys, values, key_lanes, value_lanes, pool, kv_heads = cache
    cos, sin = rope
    rows = len(slots)
    heads = kv_heads * len(group)
    p = keys.size // key_lanes.size
    padded = (head_dim + COLUMNS - 1) // COLUMNS * COLUMNS
    size = padded * LANES
    query = np.zeros((rows * heads, padded), attended.dtype)
    rotated = np.empty(head_dim, np.float32)
    nothing = np.empty(0, np.float32)
    one = np.float32(1.0)
    longest = 0
    for i in range(rows):
        at = positions[i]
        longest = max(longest, at + 1)
        for h in range(heads):
            rotate(
                qkv[i, h * head_dim : (h + 1) * head_dim],
                norms[0],
                eps,
                cos[at],
                sin[at],
                scale,
                rotated,
            )
            for d in range(head_dim):
                query[i * heads + h, d] = encode(query, rotated[d])
        block = (layer * pool + tables[slots[i], at // LANES]) * kv_heads
        for h in range(kv_heads):
            k = qkv[i, (heads + h) * head_dim : (heads + h + 1) * head_dim]
            first = (heads + kv_heads + h) * head_dim
            rotate(k, norms[1], eps, cos[at], sin[at], one, rotated)
            write_kv(
                rotated,
                qkv[i, first : first + head_dim],
                keys,
                values,
                (block + h) * size,
                at % LANES,
                p,
            )
    width = (longest + 2 * COLUMNS - 1) // COLUMNS * COLUMNS
    scores = np.empty((len(group), width), np.float32)
    weights = np.empty((len(group), width), attended.dtype)
    lanes = weights.view(key_lanes.dtype)
    query_lanes = query.view(key_lanes.dtype)
    result = np.empty((len(group), padded), np.float32)
    bases = np.empty(width // LANES, np.int64)
    for i in range(rows):
        length = positions[i] + 1
        for h in range(kv_heads):
            for t in range((length + LANES - 1) // LANES):
                block = (layer * pool + tables[slots[i], t]) * kv_heads + h
                bases[t] = block * (size // p)
            first = (i * heads + h * len(group)) * (padded // p)
            attend(
                group,
                query_lanes,
                first,
                key_lanes,
                value_lanes,
                bases,
                length,
                scores,
                weights,
                lanes,
                result,
            )
            for g in range(len(group)):
                column = (h * len(group) + g) * head_dim
                for d in range(head_dim):
                    attended[i, column + d] = encode(attended, result[g, d])


@njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract"})
def start_rows(out: Any, bias: Any, rows: int) -> None:
    """Fill the rows with the bias, or zeros where there is none."""
    for i in range(rows):
        for j in range(out.shape[1]):
            out[i, j] = np.float32(0.0)
        for j in range(len(bias)):
            out[i, j] = bias[j]


@njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract"})
def add_bias(x: Any, bias: Any, rows: int) -> None:
    """Add the bias to the residual rows; nothing where there is none."""
    for i in range(rows):
        for j in range(len(bias)):
            x[i, j] += bias[j]


@njit(cache=True, nogil=True, error_model="numpy")
def forward(
    tokens: Any,
    positions: Any,
    slots: Any,
    tables: Any,
    keep: Any,
    embed: Any,
    packed: Any,
    starts: Any,
    vectors: Any,
    splits: Any,
    sizes: Any,
    eps: Any,
    scale: Any,
    group: Any,
    cache: Any,
    rope: Any,
) -> Any:
    """Run rows through the model; returns the normed last hidden states of the rows ``keep``.

    Args: ``tokens, positions, slots`` (n,); ``tables`` (slots, blocks) the blocks of each
    sequence; ``packed`` all weight panels, of which layer l's four matrices start at
    ``starts[l]``; ``vectors[l]`` its norms and biases, cut at ``splits``; ``sizes`` (hidden,
    head_dim, qkv columns, ffn, layers), see ``packing``.
    """
    hidden, head_dim, qkv_columns, inner, layers = sizes
    n = len(tokens)
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
        attention_layer(
            qkv,
            attended,
            slots,
            positions,
            tables,
            cache,
            layer,
            group,
            head_dim,
            norms,
            eps,
            rope,
            scale,
        )
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


@njit(cache=True, nogil=True, error_model="numpy", fastmath=_SUMS)
def exponentials(row: Any, inverse: Any, weights: Any, sums: Any) -> Any:
    """exp((z - max) / T) of one row and its sums over chunks; returns the index of the max."""
    top = row[0]
    for j in range(len(weights)):
        top = max(top, row[j])
    for chunk in range(len(sums)):
        total = np.float32(0.0)
        for j in range(chunk * _CHUNK, min((chunk + 1) * _CHUNK, len(weights))):
            weights[j] = exp((row[j] - top) * inverse)
            total += weights[j]
        sums[chunk] = total
    return top


@njit(cache=True, nogil=True, error_model="numpy")
def pick(weights: Any, sums: Any, target: float) -> int:
    """First index whose running sum exceeds ``target``, never one of weight zero."""
    chunk = 0
    while chunk < len(sums) - 1 and target >= sums[chunk]:
        target -= sums[chunk]
        chunk += 1
    chosen = -1
    for j in range(chunk * _CHUNK, min((chunk + 1) * _CHUNK, len(weights))):
        if weights[j] > 0:
            chosen = j
            target -= weights[j]
            if target < 0:
                break
    return max(chosen, 0)


@njit(cache=True, nogil=True, error_model="numpy")
def draw(
    logits: Any,
    vocabulary: int,
    rows: Any,
    uniforms: Any,
    temperatures: Any,
    tokens: Any,
    logprobs: Any,
) -> None:
    """Sample one token for each entry of ``rows`` by inverse CDF; temperature 0 is greedy."""
    weights = np.empty(vocabulary, np.float32)
    sums = np.empty((vocabulary + _CHUNK - 1) // _CHUNK, np.float32)
    for i in range(len(rows)):
        row = logits[rows[i]]
        greedy = temperatures[i] == 0
        inverse = np.float32(1.0) if greedy else np.float32(1.0) / temperatures[i]
        top = exponentials(row, inverse, weights, sums)
        total = 0.0
        for s in sums:
            total += s
        chosen = 0
        if greedy:
            while chosen < vocabulary - 1 and row[chosen] != top:
                chosen += 1
        else:
            chosen = pick(weights, sums, uniforms[i] * total)
        tokens[i] = chosen
        logprobs[i] = (row[chosen] - top) * inverse - np.log(total)
