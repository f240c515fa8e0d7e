"""Bootstrap intervals that respect prompts: visits are drawn again, never single responses."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rollpacker.core.groups import weighted_icc

Floats = NDArray[np.float64]
Interval = tuple[float, float]

_MOST_WORK = 10_000_000
_DRAWS = (20, 200)
_TAILS = (0.025, 0.975)


def intervals(tokens: Floats, groups: NDArray[np.int64], seed: int = 0) -> dict[str, Interval]:
    """95% intervals of ``mean``, ``p50``, ``p99``, ``icc`` and ``icc_log``.

    Efron (1979), clusters drawn with replacement; of fewer draws for very large traces. Empty with
    fewer than two visits; without the correlations where no two visits have two responses.

    Args:
        tokens: lengths, at least 1, shape (n,).
        groups: visit of each, from 0, shape (n,).
    """
    count = int(groups.max()) + 1
    if count < 2:
        return {}
    rng = np.random.default_rng(seed)
    draws = int(np.clip(_MOST_WORK // tokens.size, *_DRAWS))
    weights = rng.multinomial(count, np.full(count, 1.0 / count), draws).astype(np.float64)
    sizes = np.bincount(groups).astype(np.float64)
    totals = np.bincount(groups, tokens)
    found = {"mean": (weights @ totals) / (weights @ sizes)}
    found |= _quantiles(tokens, groups, weights)
    several = sizes >= 2
    if several.sum() >= 2:
        found["icc"] = _icc(tokens, groups, weights, several)
        found["icc_log"] = _icc(np.log(tokens), groups, weights, several)
    return {name: _middle(values) for name, values in found.items()}


def _middle(values: Floats) -> Interval:
    known = values[np.isfinite(values)]
    low, high = np.quantile(known, _TAILS) if known.size else (np.nan, np.nan)
    return float(low), float(high)


def _quantiles(tokens: Floats, groups: NDArray[np.int64], weights: Floats) -> dict[str, Floats]:
    order = np.argsort(tokens)
    ordered = tokens[order]
    found: dict[str, list[float]] = {"p50": [], "p99": []}
    for draw in weights:
        below = draw[groups[order]].cumsum()
        for name, level in (("p50", 0.5), ("p99", 0.99)):
            found[name].append(float(ordered[np.searchsorted(below, level * below[-1])]))
    return {name: np.array(values) for name, values in found.items()}


def _icc(
    values: Floats, groups: NDArray[np.int64], weights: Floats, several: NDArray[np.bool_]
) -> Floats:
    sizes = np.bincount(groups).astype(np.float64)[several]
    means = np.bincount(groups, values)[several] / sizes
    inside = np.bincount(groups, values**2)[several] - sizes * means**2
    return weighted_icc(sizes, means, inside, weights[:, several])
