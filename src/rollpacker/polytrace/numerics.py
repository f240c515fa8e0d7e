"""The few functions of scipy that PolyTrace uses, typed (scipy has no stubs)."""

# pyright: basic

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import optimize, special, stats

Floats = NDArray[np.float64]


def normal_cdf(x: ArrayLike) -> Floats:
    """Standard normal distribution function."""
    return np.asarray(special.ndtr(x))


def midranks(x: ArrayLike) -> Floats:
    """Ranks from 1. Ties share their mean."""
    return np.asarray(stats.rankdata(x), np.float64)


def trend(x: ArrayLike, y: ArrayLike) -> tuple[float, float]:
    """Slope of the least-squares line, and the p-value of no slope (t test)."""
    line: Any = stats.linregress(x, y)
    return float(line.slope), float(line.pvalue)


def all_alike(groups: list[Floats]) -> float:
    """P-value of the groups having one distribution (Kruskal and Wallis)."""
    return float(stats.kruskal(*groups).pvalue)


def distance(a: Floats, b: Floats) -> float:
    """Largest distance of two cumulative distributions (Kolmogorov and Smirnov)."""
    found: Any = stats.ks_2samp(a, b)
    return float(found.statistic)


def least_squares(
    miss: Callable[[Floats], Floats], start: ArrayLike, low: ArrayLike, high: ArrayLike
) -> Floats:
    """Minimiser of the sum of squares of ``miss`` within bounds (trust region)."""
    bounds = (low, high)
    found = optimize.least_squares(
        miss, np.asarray(start), bounds=bounds, diff_step=1e-3, max_nfev=40
    )
    return np.asarray(found.x)


def non_negative(design: Floats, wanted: Floats) -> Floats:
    """Solution of least squares without negative values."""
    return np.asarray(optimize.nnls(design, wanted)[0])
