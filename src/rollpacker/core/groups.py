"""Groups of responses: how many to start, and how alike their values and rewards are."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_ROUNDING = 1e-9
_EQUAL = 1e-6
"""Rewards that differ by no more than this share of the largest are equal: some float32 steps."""


def over_provision(count: int, eta: float) -> int:
    """``ceil(eta * count)``, although ``1.1 * 10`` is ``11.000000000000002``."""
    return math.ceil(eta * count - _ROUNDING)


def differ(rewards: Sequence[float], least: float) -> bool:
    """Whether a group's rewards teach anything: whether their range exceeds rounding. ``least`` is
    ``rollout.min_reward_range``, and 0 allows any range above rounding."""
    if not rewards:
        return False
    spread = max(rewards) - min(rewards)
    return spread >= least if least > 0.0 else spread > _EQUAL * max(map(abs, rewards))


def intraclass_correlation(values: Floats, groups: NDArray[np.int64]) -> float:
    """ICC(1) by analysis of variance, not clipped, nan with fewer than two groups of two.
    ``values`` and ``groups`` (group numbers from 0) have shape (n,)."""
    sizes = np.bincount(groups).astype(np.float64)
    several = sizes >= 2
    if several.sum() < 2:
        return float("nan")
    means = np.bincount(groups, values) / np.maximum(sizes, 1.0)
    inside: Floats = np.bincount(groups, (values - means[groups]) ** 2).astype(np.float64)
    ones = np.ones(int(several.sum()))
    return float(weighted_icc(sizes[several], means[several], inside[several], ones))


def weighted_icc(sizes: Floats, means: Floats, inside: Floats, weights: Floats) -> Floats:
    """ICC(1) of groups that are counted ``weights`` times, nan if constant. ``sizes``, ``means``
    and ``inside`` (sums of squares around the mean) have shape (groups,), and ``weights`` has shape
    (..., groups). The result keeps the leading axes of ``weights``."""
    count = weights.sum(-1)
    total = weights @ sizes
    grand = (weights @ (sizes * means)) / total
    spread = weights @ (sizes * means**2) - total * grand**2
    between = np.maximum(spread, 0.0) / (count - 1.0)
    within = np.maximum(weights @ inside, 0.0) / (total - count)
    size = (total - (weights @ sizes**2) / total) / (count - 1.0)
    with np.errstate(invalid="ignore", divide="ignore"):
        return (between - within) / (between + (size - 1.0) * within)
