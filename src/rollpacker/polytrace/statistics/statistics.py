"""Statistics of response lengths: correlation within prompts, tails, drift."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import Literal

import numpy as np
import polars as pl
from numpy.typing import NDArray

from rollpacker.core.groups import intraclass_correlation
from rollpacker.polytrace.statistics.numerics import all_alike, midranks, trend

Floats = NDArray[np.float64]

_MOST_OF_TAIL = 0.05
_LEAST_OF_TAIL = 10
_LEAST_AT_CAP = 2
_CHANCE, _PROPERTY = 0.2, 0.6


def finished(samples: pl.DataFrame) -> pl.DataFrame:
    """Responses whose whole length is known: all but the aborted."""
    return samples.filter(pl.col("state").ne_missing("aborted"))


def lengths_of(samples: pl.DataFrame) -> Floats:
    """Tokens of each response, at least 1, shape (rows,)."""
    return np.maximum(samples["response_tokens"].to_numpy().astype(np.float64), 1.0)


def correlations(tokens: Floats, groups: NDArray[np.int64]) -> tuple[float, float]:
    """Intraclass correlation of length and of log length; nan where prompts have one response."""
    return intraclass_correlation(tokens, groups), intraclass_correlation(np.log(tokens), groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """What of a task's responses is taken.

    Args:
        icc: intraclass correlation of length within a prompt; None with one response each.
        icc_log: of log length.
    """

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
    """What length is, by its intraclass correlations; None where they are unknown.

    By the logarithm it is chance, since single long responses hide what the others tell.
    """
    if icc is None or icc_log is None:
        return None
    if icc_log < _CHANCE:
        return "mostly chance, hardly a property of the prompt"
    return "a property of the prompt" if icc > _PROPERTY else "partly a property of the prompt"


def read_of(samples: pl.DataFrame) -> Read:
    """Of a task's samples, some of them finished."""
    # Sums of floats depend on their order, and rows come in any.
    whole = finished(samples).sort("step", "prompt", "index")
    both = correlations(lengths_of(whole), visits(whole))
    icc, icc_log = (value if isfinite(value) else None for value in both)
    aborted = samples.height - whole.height
    return Read(responses=whole.height, aborted=aborted, icc=icc, icc_log=icc_log)


def known_cap(samples: pl.DataFrame) -> int | None:
    """Longest response allowed, tokens; None where unknown.

    As recorded (unless responses are longer: it then limits one turn), else the maximum where
    several responses share it, but not all: equal lengths tell nothing, nor does one response that
    is repeated, as greedy sampling does in every step and group.
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
    """Whether all of this length may be one response: those of one prompt, each of another step, or
    of groups in which lengths never differ."""
    at = samples.filter(pl.col("response_tokens") == longest).select("step", "prompt")
    if at["prompt"].n_unique() > 1:
        return False
    if at.n_unique() == at.height:
        return True
    groups = samples.group_by("step", "prompt").agg(pl.col("response_tokens").n_unique())
    return bool((groups["response_tokens"] == 1).all())


def visits(samples: pl.DataFrame) -> NDArray[np.int64]:
    """Number of the visit (a prompt in a step) of each row, 0 on, shape (rows,)."""
    keys = samples.select(pl.struct("step", "prompt").rank("dense") - 1).to_series()
    return keys.to_numpy().astype(np.int64)


def tail_index(lengths: Floats, cap: float | None) -> float | None:
    """Hill's exponent of the longest 5%, those at the cap censored; None where it has no tail.

    Below 2 the variance does not settle, below 1 the mean does not. Hill (1975).
    """
    ordered = np.sort(lengths)[::-1]
    count = max(_LEAST_OF_TAIL, int(_MOST_OF_TAIL * ordered.size))
    if ordered.size <= 2 * count:
        return None
    start = ordered[count]
    logs = float(np.log(ordered[:count] / start).sum())
    inside = count if cap is None else int(np.sum(ordered[:count] < cap))
    return inside / logs if logs > 0.0 and inside else None


def area_under_curve(scores: Floats, labels: NDArray[np.bool_]) -> float | None:
    """Chance that a positive scores above a negative, ties by half; None without both."""
    positives = int(labels.sum())
    negatives = labels.size - positives
    if positives == 0 or negatives == 0:
        return None
    ranks = midranks(scores)
    excess = float(ranks[labels].sum()) - positives * (positives + 1) / 2
    return excess / (positives * negatives)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """Change of a prompt's mean log length over steps.

    Args:
        slope: change of log length a step (about the relative change of length).
        slope_p: p-value of no linear trend (t test over visits).
        differ_p: p-value of all steps being alike (Kruskal and Wallis over visits).
    """

    slope: float
    slope_p: float
    differ_p: float


def drift(samples: pl.DataFrame) -> Drift | None:
    """Drift over steps, visits of prompts counted once each; None with fewer than two steps."""
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
