"""Top-k and top-p sampling of one row, on the CPU."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


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
