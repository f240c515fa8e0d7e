"""The few functions of scipy that PolyTrace uses, typed (scipy has no stubs)."""

# pyright: basic

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import optimize, special, stats

Floats = NDArray[np.float64]


def normal_cdf(x: ArrayLike) -> Floats:
    """Standard normal distribution function."""
    return np.asarray(special.ndtr(x))


def log_normal_cdf(x: ArrayLike) -> Floats:
    """Its logarithm."""
    return np.asarray(special.log_ndtr(x))


def logistic(x: float) -> float:
    """1 / (1 + exp(-x))."""
    return float(special.expit(x))


def log_sum_exp(x: Floats, axis: tuple[int, ...]) -> Floats:
    """Logarithm of the sum of exponentials over ``axis``."""
    return np.asarray(special.logsumexp(x, axis=axis))


def beta_quantiles(levels: ArrayLike, a: float, b: float) -> Floats:
    """Quantiles of Beta(a, b)."""
    return np.asarray(stats.beta.ppf(levels, a, b))


def midranks(x: ArrayLike) -> Floats:
    """Ranks from 1, ties share their mean."""
    return np.asarray(stats.rankdata(x), np.float64)


def trend(x: ArrayLike, y: ArrayLike) -> tuple[float, float]:
    """Slope of the least-squares line, and the p-value of no slope (t test)."""
    line: Any = stats.linregress(x, y)
    return float(line.slope), float(line.pvalue)


def all_alike(groups: Sequence[Floats]) -> float:
    """P-value of the groups having one distribution (Kruskal and Wallis)."""
    return float(stats.kruskal(*groups).pvalue)


def least_squares(
    miss: Callable[[Floats], Floats], start: ArrayLike, low: ArrayLike, high: ArrayLike
) -> Floats:
    """Minimiser of the sum of squares of ``miss`` within bounds (trust region)."""
    found = optimize.least_squares(
        miss, np.asarray(start), bounds=(low, high), diff_step=1e-3, max_nfev=40
    )
    return np.asarray(found.x)


def simplex(cost: Callable[[Floats], float], start: Floats, evaluations: int) -> Floats:
    """Minimiser of ``cost`` (Nelder and Mead)."""
    options = {"maxfev": evaluations, "xatol": 1e-2, "fatol": 1e-2, "adaptive": True}
    return np.asarray(optimize.minimize(cost, start, method="Nelder-Mead", options=options).x)
