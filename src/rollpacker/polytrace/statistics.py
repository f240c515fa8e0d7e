"""Statistics of response lengths."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import Literal

import numpy as np
import polars as pl
from numpy.typing import ArrayLike, NDArray

from rollpacker.core.groups import intraclass_correlation, weighted_icc
from rollpacker.polytrace.numerics import all_alike, midranks, trend

# --- Quantiles

Floats = NDArray[np.float64]

_LEVELS = np.concatenate(
    [
        [0.0, 0.005, 0.01, 0.02, 0.03],
        np.arange(0.05, 0.9, 0.05),
        [0.9, 0.925, 0.95, 0.96, 0.97, 0.98, 0.985, 0.99, 0.9925, 0.995, 0.9975],
        [0.999, 0.9995, 0.9998, 0.9999, 1.0],
    ]
)
_SMALLEST = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantileTable:
    """Quantiles, interpolated on a log scale between levels. ``levels``: increasing from 0 to 1,
    at least two. ``values``: quantiles at the levels, positive, not decreasing."""

    levels: tuple[float, ...]
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        levels, values = np.asarray(self.levels), np.asarray(self.values)
        if levels.size < 2 or levels.size != values.size:
            raise ValueError("quantile table: levels and values must have one length, at least 2")
        if levels[0] != 0.0 or levels[-1] != 1.0 or (np.diff(levels) <= 0.0).any():
            raise ValueError("quantile table: levels must increase from 0 to 1")
        if values[0] <= 0.0 or (np.diff(values) < 0.0).any():
            raise ValueError("quantile table: values must be positive and must not decrease")

    @classmethod
    def of(cls, values: ArrayLike, edge: float | None = None) -> QuantileTable:
        """Make the table of a sample. ``edge``: one more level to keep (the start of an atom)."""
        seen = np.maximum(np.asarray(values, np.float64), _SMALLEST)
        if seen.size == 0:
            raise ValueError("quantile table: no values")
        known = (seen.size * (1.0 - _LEVELS) >= 1.0) | (_LEVELS == 1.0) | (_LEVELS == 0.0)
        levels = _LEVELS[known]
        if edge is not None and 0.0 < edge < 1.0:
            levels = np.unique(np.append(levels[np.abs(levels - edge) > 1e-6], edge))
        quantiles = np.maximum.accumulate(np.quantile(seen, levels))
        return cls(
            levels=tuple(float(level) for level in levels.round(6)),
            values=tuple(float(f"{value:.6g}") for value in quantiles),
        )

    def at(self, levels: ArrayLike) -> Floats:
        log = np.interp(np.asarray(levels), self.levels, np.log(self.values))
        return np.exp(log)

    def sample(self, rng: np.random.Generator, shape: int | tuple[int, ...]) -> Floats:
        return self.at(rng.random(shape))


# --- Correlation within prompts, tails, drift

_MOST_OF_TAIL = 0.05
_LEAST_OF_TAIL = 10
_LEAST_AT_CAP = 2
_CHANCE, _PROPERTY = 0.2, 0.6


def finished(samples: pl.DataFrame) -> pl.DataFrame:
    """Return the responses of known length: all except aborted ones."""
    return samples.filter(pl.col("state").ne_missing("aborted"))


def lengths_of(samples: pl.DataFrame) -> Floats:
    """Return the tokens of each response, at least 1, shape (rows,)."""
    return np.maximum(samples["response_tokens"].to_numpy().astype(np.float64), 1.0)


def correlations(tokens: Floats, groups: NDArray[np.int64]) -> tuple[float, float]:
    """Return the ICC of length and of log length. NaN if prompts have one response."""
    return intraclass_correlation(tokens, groups), intraclass_correlation(np.log(tokens), groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """Counts of a task's responses, and their ICC of length. None with one response per prompt."""

    responses: int
    aborted: int
    icc: float | None
    icc_log: float | None


Dependence = Literal[
    "a property of the prompt",
    "partly a property of the prompt",
    "mostly chance, hardly a property of the prompt",
]


def dependence(icc: float | None, icc_log: float | None) -> Dependence | None:
    """Describe how prompts determine length, by the ICCs. None if they are unknown. The ICC of
    log length decides about chance, since single long responses dominate the other."""
    if icc is None or icc_log is None:
        return None
    if icc_log < _CHANCE:
        return "mostly chance, hardly a property of the prompt"
    return "a property of the prompt" if icc > _PROPERTY else "partly a property of the prompt"


def read_of(samples: pl.DataFrame) -> Read:
    """Count a task's responses. At least one must be finished."""
    # Sums of floats depend on their order, and rows come in any.
    whole = finished(samples).sort("step", "prompt", "index")
    both = correlations(lengths_of(whole), visits(whole))
    icc, icc_log = (value if isfinite(value) else None for value in both)
    aborted = samples.height - whole.height
    return Read(responses=whole.height, aborted=aborted, icc=icc, icc_log=icc_log)


def known_cap(samples: pl.DataFrame) -> int | None:
    """Return the longest allowed response in tokens, or None if it is unknown.

    The recorded cap counts, unless responses are longer: then it limits one turn. Else the maximum
    counts if several responses share it, but not all, and if they are no copies of one response.
    """
    lengths = finished(samples)["response_tokens"].to_numpy()
    longest = int(lengths.max()) if lengths.size else 0
    recorded = samples["cap"].drop_nulls().to_numpy()
    if recorded.size:
        return int(recorded.max()) if longest <= int(recorded.max()) else None
    shared = int(np.sum(lengths == longest))
    if not _LEAST_AT_CAP <= shared < lengths.size:
        return None
    return None if _is_repeated(samples, longest) else longest


def _is_repeated(samples: pl.DataFrame, longest: int) -> bool:
    """Whether all responses of this length may be copies of one. They are if they answer one
    prompt, either each in another step or in groups of equal lengths."""
    at = samples.filter(pl.col("response_tokens") == longest).select("step", "prompt")
    if at["prompt"].n_unique() > 1:
        return False
    if at.n_unique() == at.height:
        return True
    groups = samples.group_by("step", "prompt").agg(pl.col("response_tokens").n_unique())
    return bool((groups["response_tokens"] == 1).all())


def visits(samples: pl.DataFrame) -> NDArray[np.int64]:
    """Return the number of each row's visit (a prompt in a step), from 0, shape (rows,)."""
    keys = samples.select(pl.struct("step", "prompt").rank("dense") - 1).to_series()
    return keys.to_numpy().astype(np.int64)


def tail_index(lengths: Floats, cap: float | None) -> float | None:
    """Return Hill's exponent (1975) of the longest 5%, with those at the cap censored. None if
    there is no tail. Below 2 the variance does not converge, below 1 the mean does not."""
    ordered = np.sort(lengths)[::-1]
    count = max(_LEAST_OF_TAIL, int(_MOST_OF_TAIL * ordered.size))
    if ordered.size <= 2 * count:
        return None
    start = ordered[count]
    logs = float(np.log(ordered[:count] / start).sum())
    inside = count if cap is None else int(np.sum(ordered[:count] < cap))
    return inside / logs if logs > 0.0 and inside else None


def area_under_curve(scores: Floats, labels: NDArray[np.bool_]) -> float | None:
    """Return the chance that a positive scores above a negative, ties by half. None without
    both."""
    positives = int(labels.sum())
    negatives = labels.size - positives
    if positives == 0 or negatives == 0:
        return None
    ranks = midranks(scores)
    excess = float(ranks[labels].sum()) - positives * (positives + 1) / 2
    return excess / (positives * negatives)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """Change of a prompt's mean log length per step, with p-values. ``slope_p``: of no linear
    trend (t test over visits). ``differ_p``: of equal distributions in all steps (Kruskal and
    Wallis over visits)."""

    slope: float
    slope_p: float
    differ_p: float


def drift(samples: pl.DataFrame) -> Drift | None:
    """Return the drift over steps, each visit counted once. None with fewer than two steps."""
    means = (
        samples.group_by("step", "prompt")
        .agg(pl.col("response_tokens").clip(1).log().mean().alias("log"))
        .sort("step", "prompt")
    )
    steps, logs = means["step"].to_numpy(), means["log"].to_numpy()
    counts = np.unique(steps, return_counts=True)[1]
    if counts.size < 2 or steps.size < 3 or np.ptp(logs) == 0.0:
        return None
    slope, slope_p = trend(steps.astype(np.float64), logs)
    groups = [logs[steps == step] for step in np.unique(steps)]
    return Drift(slope=slope, slope_p=slope_p, differ_p=all_alike(groups))


# --- Predicting the tail from responses that have finished

TAIL_SHARE = 0.2  # A tail prompt's longest response is among the longest fifth of prompts'


@dataclass(frozen=True, slots=True, kw_only=True)
class TailPrediction:
    """Chance that a tail prompt scores above another (0.5: a coin), None if undefined.

    Args:
        first: by the length of the first response of the prompt to finish.
        fourth: by that of the fourth to finish, of prompts with five or more.
        history: by the mean length at the prompt's earlier visits.
    """

    first: float | None
    fourth: float | None
    history: float | None


def tail_prediction(samples: pl.DataFrame) -> TailPrediction:
    """Predict which visits of prompts hold a tail response. All responses of a prompt start
    together, so the shortest finishes first. The longest response never predicts itself."""
    length = pl.col("response_tokens")
    visits = samples.group_by("step", "prompt").agg(
        length.max().alias("longest"),
        length.mean().alias("mean"),
        length.sort().get(0, null_on_oob=True).alias("first"),
        length.sort().get(3, null_on_oob=True).alias("fourth"),
        pl.len().alias("count"),
    )
    visits = visits.sort("step", "prompt").with_columns(
        (pl.col("mean").cum_sum() / pl.col("mean").cum_count())
        .shift(1)
        .over("prompt")
        .alias("past")
    )
    return TailPrediction(
        first=_predicted(visits.filter(pl.col("count") > 1), "first"),
        fourth=_predicted(visits.filter(pl.col("count") > 4), "fourth"),
        history=_predicted(visits.filter(pl.col("past").is_not_null()), "past"),
    )


def _predicted(visits: pl.DataFrame, score: str) -> float | None:
    if visits.height == 0:
        return None
    longest = visits["longest"].to_numpy().astype(np.float64)
    tail = longest >= np.quantile(longest, 1.0 - TAIL_SHARE)
    return area_under_curve(visits[score].to_numpy().astype(np.float64), tail)


# --- Bootstrap intervals: visits are drawn again, never single responses

Interval = tuple[float, float]

_MOST_WORK = 10_000_000
_DRAWS = (20, 200)
_TAILS = (0.025, 0.975)


def intervals(tokens: Floats, groups: NDArray[np.int64], seed: int = 0) -> dict[str, Interval]:
    """Return 95% intervals of ``mean``, ``p50``, ``p99``, ``icc`` and ``icc_log``.

    Efron (1979), with clusters drawn with replacement. Empty with fewer than two visits, and
    without correlations if fewer than two visits have two responses.

    ``tokens``: lengths, at least 1, shape (n,). ``groups``: visit of each, from 0, shape (n,).
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
