"""Sampling of one row in float64: what every other way to draw is compared with."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rollpacker.engine.sampling.race import CHUNK, keys, places, times


def draw_token(
    logits: NDArray[np.float32], temperature: float, top_k: int, top_p: float, uniform: float
) -> tuple[int, float]:
    """Sample from the renormalised top-k, then top-p set; returns the token and its logprob.

    The nucleus (Holtzman et al., 2020) is the smallest set of most likely tokens whose mass
    reaches ``top_p``; ties go to the lower id. ``temperature`` 0 is greedy, from all tokens.

    Args:
        logits: shape (vocabulary,).
        temperature, top_k, top_p: as in ``SamplingParams``.
        uniform: the token's number in its seed's stream.
    """
    scaled = logits.astype(np.float64) / (temperature or 1.0)
    weights = np.exp(scaled - scaled.max())
    if temperature == 0:
        return int(weights.argmax()), float(-np.log(weights.sum()))
    kept = np.sort(_most_likely(weights, top_k, top_p))
    ring = times(keys(np.array([uniform])), places(len(weights)))
    running, starts = np.unique(kept // CHUNK, return_index=True)
    sums = np.add.reduceat(weights[kept], starts)
    if len(weights) > CHUNK:
        kept = kept[kept // CHUNK == running[np.argmax(sums / ring[CHUNK + running])]]
    token = int(kept[np.argmax(weights[kept] / ring[kept % CHUNK])])
    return token, float(np.log(weights[token] / sums.sum()))


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
