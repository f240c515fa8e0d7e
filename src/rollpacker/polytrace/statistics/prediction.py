"""Can the tail be told early? Areas under the curve of simple predictors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from rollpacker.polytrace.statistics.statistics import area_under_curve

TAIL_SHARE = 0.2
"""A prompt is of the tail when its longest response is among the longest fifth of prompts'."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TailPrediction:
    """Chance that a tail prompt scores above another (0.5: a coin), None where undefined.

    Args:
        first: by the length of the first response of the prompt to finish.
        fourth: by that of the fourth to finish, of prompts with five or more.
        history: by the mean length at the prompt's earlier visits.
    """

    first: float | None
    fourth: float | None
    history: float | None


def tail_prediction(samples: pl.DataFrame) -> TailPrediction:
    """Predict which visits of prompts hold a tail response.

    All responses of a prompt start together, so the shortest finishes first. The longest response
    is never its own predictor: a prompt needs more responses than the predictor has seen.
    """
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
