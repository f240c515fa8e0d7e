"""Sampling of many rows on a CPU, compiled by numba except for top-k and top-p."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from rollpacker.engine.arithmetic import ELEMENTWISE, exp, total
from rollpacker.engine.base import Floats, Ints
from rollpacker.engine.sampling.race import (
    CHUNK,
    FIRST,
    GOLDEN,
    SECOND,
    SHARE,
    RowDraws,
    draw_token,
)

_GOLDEN, _FIRST, _SECOND = np.uint64(GOLDEN), np.uint64(FIRST), np.uint64(SECOND)
_12, _27, _30, _31 = np.uint64(12), np.uint64(27), np.uint64(30), np.uint64(31)


@njit(cache=True, nogil=True, error_model="numpy", fastmath=ELEMENTWISE)
def exponentials(row: Any, inverse: Any, weights: Any, sums: Any) -> Any:
    """exp((z - max) / T) of one row and its sums over chunks. Returns the max."""
    top = row[0]
    for j in range(len(weights)):
        top = max(top, row[j])
    for chunk in range(len(sums)):
        start = chunk * CHUNK
        logits, part = row[start:], weights[start : start + CHUNK]
        for j in range(len(part)):
            part[j] = exp((logits[j] - top) * inverse)
        sums[chunk] = total(part, len(part))
    return top


@njit(cache=True, nogil=True, error_model="numpy")
def mix(z: Any) -> Any:
    """``race.mix`` of an unsigned integer."""
    z = (z ^ (z >> _30)) * _FIRST
    z = (z ^ (z >> _27)) * _SECOND
    return z ^ (z >> _31)


@njit(cache=True, nogil=True, error_model="numpy")
def first(weights: Any, key: Any, place: int) -> int:
    """The winner, with the numbers from ``place`` on. It never has weight zero."""
    chosen, soonest = 0, np.inf
    for j in range(len(weights)):
        drawn = mix(key + np.uint64(place + j + 1) * _GOLDEN) >> _12
        u = (float(np.int64(drawn)) + 0.5) * SHARE
        # Skip the logarithm if its lower bound is too late already.
        if 1.0 - u < soonest * weights[j]:
            time = -np.log(u) / weights[j]
            if time < soonest:
                chosen, soonest = j, time
    return chosen


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
    """Sample one token for each entry of ``rows`` by a race. Temperature 0 is greedy."""
    weights = np.empty(vocabulary, np.float32)
    sums = np.empty((vocabulary + CHUNK - 1) // CHUNK, np.float32)
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
            key = mix(np.uint64(uniforms[i] * 2.0**53))
            start = first(sums, key, CHUNK) * CHUNK if len(sums) > 1 else 0
            chosen = start + first(weights[start : start + CHUNK], key, 0)
        tokens[i] = chosen
        logprobs[i] = (row[chosen] - top) * inverse - np.log(mass)


def draw_compiled(
    logits: Floats, vocabulary: int, rows: Ints, draws: RowDraws
) -> tuple[Ints, Floats]:
    """A token and logprob for each of ``draws`` (d,), from ``rows`` (d,) of logits (m, at least
    ``vocabulary``)."""
    tokens, logprobs = np.empty(len(rows), np.int32), np.empty(len(rows), np.float32)
    draw(logits, vocabulary, rows, draws.uniform, draws.temperature, tokens, logprobs)
    limited = (draws.top_p < 1) | (draws.top_k > 0)
    for i in np.flatnonzero(limited & (draws.temperature > 0)):
        tokens[i], logprobs[i] = draw_token(
            logits[rows[i], :vocabulary],
            float(draws.temperature[i]),
            int(draws.top_k[i]),
            float(draws.top_p[i]),
            float(draws.uniform[i]),
        )
    return tokens, logprobs
