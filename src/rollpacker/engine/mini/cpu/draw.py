"""Sampling from logits on the CPU, compiled by numba."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from rollpacker.engine.mini.cpu.kernels import ELEMENTWISE, exp, total

_CHUNK = 256


@njit(cache=True, nogil=True, error_model="numpy", fastmath=ELEMENTWISE)
def exponentials(row: Any, inverse: Any, weights: Any, sums: Any) -> Any:
    """exp((z - max) / T) of one row and its sums over chunks; returns the index of the max."""
    top = row[0]
    for j in range(len(weights)):
        top = max(top, row[j])
    for chunk in range(len(sums)):
        start = chunk * _CHUNK
        logits, part = row[start:], weights[start : start + _CHUNK]
        for j in range(len(part)):
            part[j] = exp((logits[j] - top) * inverse)
        sums[chunk] = total(part, len(part))
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
        mass = 0.0
        for s in sums:
            mass += s
        chosen = 0
        if greedy:
            while chosen < vocabulary - 1 and row[chosen] != top:
                chosen += 1
        else:
            chosen = pick(weights, sums, uniforms[i] * mass)
        tokens[i] = chosen
        logprobs[i] = (row[chosen] - top) * inverse - np.log(mass)
