"""The CPU forward pass and sampler, compiled by numba and cached on disk.

A *row* is one token at one position of one sequence. All rows of a call run together: each layer
first writes their keys and values, then each row attends to the tokens up to its own position, so
prompts and decoding sequences mix freely and nothing is padded. Every row is computed by itself
in a fixed order of operations: results do not depend on what else is in the batch, nor on where
arrays lie in memory.

Layouts, with P = 1 for float32 and P = 2 for bfloat16 (neighbours along the reduced dimension
share a 32-bit lane): weights ``[panel of 32 columns][depth / P][32][P]``; keys of a block of 16
tokens ``[kv head][head dim / P][16][P]``; values ``[kv head][16 / P][head dim][P]``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from rollpacker.engine.mini.cpu.attention import attention_layer
from rollpacker.engine.mini.cpu.kernels import decode, gate, multiply, normalise
from rollpacker.engine.mini.cpu.lanes import COLUMNS


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
    """Run rows through the model; returns the normed last hidden states of the rows ``keep``.

    Args: ``tokens`` (n,); ``batch`` their positions (n,), slots (n,) and the blocks of each
    sequence (slots, blocks); ``packed`` all weight panels, of which layer l's four matrices start
    at ``starts[l]``; ``vectors[l]`` its norms and biases, cut at ``splits``; ``sizes`` (hidden,
    head_dim, qkv columns, ffn, layers), see ``packing``; ``rope`` cosines, sines, the norms'
    epsilon and the scale of queries.
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
