"""Sampling from logits on the CPU, compiled by numba but where it is of the most likely tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from rollpacker.engine.mini.cpu.kernels import ELEMENTWISE, exp, total
from rollpacker.engine.mini.runner import Draws, Floats, Ints

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


def restrict(
    draws: Draws, row: Callable[[np.int32], Floats], tokens: Ints, logprobs: Floats
) -> None:
    """Draw those again that want top-k or top-p; ``row`` gives logits (vocabulary,) by row."""
    limited = (draws.top_p < 1) | (draws.top_k > 0)
    for i in np.flatnonzero(limited & (draws.temperatures > 0)):
        tokens[i], logprobs[i] = restricted_draw(
            row(draws.rows[i]),
            float(draws.temperatures[i]),
            int(draws.top_k[i]),
            float(draws.top_p[i]),
            float(draws.uniforms[i]),
        )


def restricted_draw(
    logits: NDArray[np.float32], temperature: float, top_k: int, top_p: float, uniform: float
) -> tuple[int, float]:
    """Sample from the renormalised top-k, then top-p set; returns the token and its logprob.

    The nucleus (Holtzman et al., 2020) is the smallest set of most likely tokens whose mass
    reaches ``top_p``; ties go to the lower id. ``temperature`` is above 0.
    """
    scaled = logits.astype(np.float64) / temperature
    weights = np.exp(scaled - scaled.max())
    kept = _most_likely(weights, top_k, top_p)
    kept.sort()
    mass = np.cumsum(weights[kept])
    place = int(np.searchsorted(mass, uniform * mass[-1], side="right"))
    token = int(kept[min(place, len(kept) - 1)])
    return token, float(np.log(weights[token] / mass[-1]))


def _most_likely(weights: NDArray[np.float64], top_k: int, top_p: float) -> NDArray[np.int64]:
    size = len(weights)
    kept = np.arange(size)
    if 0 < top_k < size:
        bound = np.partition(weights, size - top_k)[size - top_k]
        kept = np.flatnonzero(weights >= bound)
        kept = kept[np.argsort(-weights[kept], kind="stable")][:top_k]
    if top_p < 1.0:
        total = weights[kept].sum()
        # Tokens below this share add up to less than 1 - top_p: none of them is in the nucleus.
        candidates = kept[weights[kept] >= total * (1.0 - top_p) / len(kept)]
        candidates = candidates[np.argsort(-weights[candidates], kind="stable")]
        mass = np.cumsum(weights[candidates])
        kept = candidates[: int(np.searchsorted(mass, top_p * total, side="left")) + 1]
    return kept
