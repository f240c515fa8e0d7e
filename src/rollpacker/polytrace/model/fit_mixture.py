"""Maximum likelihood of the body and tail mixture, prompts' shared parts integrated out."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rollpacker.polytrace.model.length_model import LengthModel
from rollpacker.polytrace.statistics.numerics import (
    beta_quantiles,
    log_normal_cdf,
    log_sum_exp,
    logistic,
    simplex,
)

Floats = NDArray[np.float64]

_SHARED, _SHARED_WEIGHTS = np.polynomial.hermite_e.hermegauss(15)
_SHARE_LEVELS = (np.arange(9) + 0.5) / 9
_MOST_PROMPTS = 400
_SHORTEST = 2.5
_EVALUATIONS = 400


def fit_mixture(tokens: Floats, groups: NDArray[np.int64], cap: int | None) -> LengthModel:
    """The likeliest ``LengthModel``; of at most 400 prompts, drawn with a seed of 0.

    Responses at the cap are right-censored. A few very short ones (empty answers), which a
    log-normal would stretch for, are raised to 2.5 deviations below the median. The tail's reach
    is set by quantiles of the data, the other parameters by a simplex search.

    Args:
        tokens: lengths, at least 1, shape (n,).
        groups: prompt of each, from 0, shape (n,).
        cap: longest response allowed; None where unknown.
    """
    longest = cap if cap is not None else int(tokens.max())
    censored = cap if cap is not None else np.inf
    logs, groups = _some_prompts(np.log(tokens), groups)
    half, spread = _body(logs)
    logs = np.maximum(logs, half - _SHORTEST * spread)
    bounds = _tail_bounds(logs, cap)
    start = _start(logs, bounds)

    def cost(free: Floats) -> float:
        return -_log_likelihood(free, bounds, logs, groups, censored)

    best = simplex(cost, start, _EVALUATIONS)
    median, between, within, share, concentration = _natural(best)
    return LengthModel(
        median=float(np.exp(median)),
        between=float(between),
        within=float(within),
        tail_share=float(share),
        tail_concentration=float(concentration),
        tail_low=float(np.exp(bounds[0])),
        tail_high=float(np.exp(bounds[1])),
        cap=longest,
    )


def _some_prompts(logs: Floats, groups: NDArray[np.int64]) -> tuple[Floats, NDArray[np.int64]]:
    count = int(groups.max()) + 1
    if count <= _MOST_PROMPTS:
        return logs, groups
    chosen = np.random.default_rng(0).permutation(count)[:_MOST_PROMPTS]
    number = np.full(count, -1)
    number[chosen] = np.arange(chosen.size)
    kept = number[groups] >= 0
    return logs[kept], number[groups[kept]]


def _body(logs: Floats) -> tuple[float, float]:
    """Mean and deviation of the normal that has the quartiles of the data."""
    quarter, half, three = np.quantile(logs, [0.25, 0.5, 0.75])
    return float(half), max(float(three - quarter) / 1.349, 1e-3)


def _tail_bounds(logs: Floats, cap: int | None) -> tuple[float, float]:
    """From where a normal body of the same quartiles would hold 1 in 100, to the longest."""
    half, spread = _body(logs)
    low = half + 2.33 * spread
    high = max(float(logs.max()), low + 0.1)
    if cap is not None and low > np.log(cap) - 0.1:
        low = np.log(cap) - 0.1
    return float(low), float(high) + (0.05 if cap is not None else 0.0)


def _start(logs: Floats, bounds: tuple[float, float]) -> Floats:
    half, spread = _body(logs)
    share = np.clip(np.mean(logs > bounds[0]), 0.002, 0.4)
    return np.array(
        [half, np.log(0.5 * spread), np.log(0.85 * spread), np.log(share / (1 - share)), 3.0]
    )


def _natural(free: Floats) -> Floats:
    """Median (log), between, within, tail share, tail concentration."""
    share = np.clip(logistic(free[3]), 1e-6, 0.9)
    concentration = np.exp(np.clip(free[4], 0.0, 6.0))
    spreads = np.exp(np.clip(free[1:3], -8.0, 3.0))
    return np.array([free[0], *spreads, share, concentration])


def _log_likelihood(
    free: Floats,
    bounds: tuple[float, float],
    logs: Floats,
    groups: NDArray[np.int64],
    cap: float,
) -> float:
    median, between, within, share, concentration = _natural(free)
    at_cap = logs >= np.log(cap)
    score = (logs[:, None] - median - between * _SHARED) / within
    body = -0.5 * score**2 - np.log(within * np.sqrt(2.0 * np.pi))
    body[at_cap] = log_normal_cdf(-score[at_cap])
    low, high = bounds
    inside = (logs >= low) & (logs <= high)
    tail = np.where(inside, 1.0 / (high - low), 0.0)
    if at_cap.any():
        tail[at_cap] = np.clip((high - np.log(cap)) / (high - low), 0.0, 1.0)
    shares = beta_quantiles(_SHARE_LEVELS, share * concentration, (1.0 - share) * concentration)
    shares = np.clip(shares, 1e-12, 1.0 - 1e-9)
    # (responses, shared nodes, share nodes)
    mixed = np.exp(body)[:, :, None] * (1.0 - shares) + (tail[:, None] * shares)[:, None, :]
    both = np.log(mixed + 1e-300)
    order = np.argsort(groups, kind="stable")
    starts = np.searchsorted(groups[order], np.arange(int(groups.max()) + 1))
    grouped = np.add.reduceat(both[order], starts, axis=0)
    weights = np.log(_SHARED_WEIGHTS / _SHARED_WEIGHTS.sum())[:, None] - np.log(shares.size)
    return float(np.sum(log_sum_exp(grouped + weights, axis=(1, 2))))
