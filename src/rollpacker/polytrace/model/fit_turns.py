"""Fit turns and tool calls to multi-turn responses."""

from __future__ import annotations

import numpy as np
import polars as pl
from numpy.typing import NDArray

from rollpacker.polytrace.model.turn_model import TurnModel
from rollpacker.polytrace.statistics.quantiles import QuantileTable

Floats = NDArray[np.float64]

_CLASSES = (0.2, 0.4, 0.6, 0.8, 0.9)
_NO_HIT = 1e-6


def fit_turns(samples: pl.DataFrame) -> TurnModel | None:
    """The turns of one task's responses; None where none has two turns or a tool call."""
    known = samples.filter(pl.col("turns").list.len() > 0)
    several = known.filter(
        (pl.col("turns").list.len() > 1) | (pl.col("tools").list.len().fill_null(0) > 0)
    )
    if several.height == 0:
        return None
    known = known.with_row_index("sample")
    turns = _turn_rows(known)
    tools = known.select("sample", "tools").explode("tools").drop_nulls("tools").unnest("tools")
    turns = _with_calls(turns, tools)
    count = known["turns"].list.len().to_numpy().astype(np.int64)
    tokens = known["response_tokens"].to_numpy().astype(np.float64)
    levels = np.unique(np.quantile(tokens, _CLASSES))
    shares, concentration = _splits(turns, int(count.max()))
    later = turns.filter(pl.col("turn") > 0)
    return TurnModel(
        levels=tuple(levels.tolist()),
        turns=_chances(np.searchsorted(levels, tokens), count, levels.size + 1),
        shares=shares,
        concentration=concentration,
        calls=_calls(turns),
        tools=_names(tools["name"]),
        statuses=_names(tools["status"]),
        tool_tokens=_table(tools["tokens"]),
        tool_latency_s=_table(tools["latency_s"]),
        framing=_framing(later),
        cached_first=_hits(turns.filter(pl.col("turn") == 0), pl.col("prompt_tokens")),
        cached_later=_hits(later, pl.col("before")),
    )


def _turn_rows(known: pl.DataFrame) -> pl.DataFrame:
    """One row a turn, with its number, the number of turns and the context before it."""
    rows = known.select("sample", "turns", pl.col("turns").list.len().alias("count"))
    rows = rows.explode("turns").unnest("turns")
    context = pl.col("prompt_tokens") + pl.col("completion_tokens")
    return rows.with_columns(
        pl.int_range(pl.len()).over("sample").alias("turn"),
        context.shift(1).over("sample").alias("before"),
        (pl.col("completion_tokens") / pl.col("completion_tokens").sum())
        .over("sample")
        .alias("share"),
    )


def _with_calls(turns: pl.DataFrame, tools: pl.DataFrame) -> pl.DataFrame:
    """Adds ``calls`` of each turn and ``added``: tokens of the calls of the turn before."""
    made = tools.group_by("sample", "turn").agg(
        pl.len().alias("calls"), pl.col("tokens").sum().alias("tool_tokens")
    )
    made = made.with_columns(pl.col("turn").cast(pl.Int64))
    joined = turns.with_columns(pl.col("turn").cast(pl.Int64)).join(
        made, on=["sample", "turn"], how="left", maintain_order="left"
    )
    return joined.with_columns(
        pl.col("calls").fill_null(0),
        pl.col("tool_tokens").fill_null(0).shift(1).over("sample").alias("added"),
    )


def _chances(
    classes: NDArray[np.intp], count: NDArray[np.int64], total: int
) -> tuple[tuple[float, ...], ...]:
    most = int(count.max())
    every = np.bincount(count - 1, minlength=most)
    table = [np.bincount(count[classes == each] - 1, minlength=most) for each in range(total)]
    rows = [row if row.sum() else every for row in table]
    return tuple(tuple((row / row.sum()).round(4).tolist()) for row in rows)


def _splits(
    turns: pl.DataFrame, most: int
) -> tuple[tuple[tuple[float, ...], ...], tuple[float, ...]]:
    """Mean shares and Dirichlet concentration by number of turns, by the method of moments."""
    shares: list[tuple[float, ...]] = []
    concentration: list[float] = []
    for count in range(1, most + 1):
        seen = turns.filter(pl.col("count") == count)["share"].to_numpy().reshape(-1, count)
        mean = seen.mean(axis=0) if len(seen) else np.full(count, 1.0 / count)
        spread = float(seen.var(axis=0).sum()) if len(seen) > 1 else 0.0
        fitted = float(np.sum(mean * (1.0 - mean))) / spread - 1.0 if spread > 0.0 else 50.0
        shares.append(tuple(np.maximum(mean, 1e-4).round(5).tolist()))
        concentration.append(round(float(np.clip(fitted, 0.5, 500.0)), 4))
    return tuple(shares), tuple(concentration)


def _calls(turns: pl.DataFrame) -> tuple[float, ...]:
    inner = turns.filter(pl.col("turn") + 1 < pl.col("count"))
    if inner.height == 0:
        return (1.0,)
    seen = np.bincount(inner["calls"].to_numpy().astype(np.int64))
    return tuple((seen / seen.sum()).round(5).tolist())


def _names(names: pl.Series) -> dict[str, float]:
    seen = names.drop_nulls()
    if seen.len() == 0:
        return {"tool": 1.0}
    counts = seen.value_counts(sort=True, normalize=True, name="share")
    return {str(name): round(float(share), 5) for name, share in counts.iter_rows()}


def _table(values: pl.Series) -> QuantileTable:
    seen = values.drop_nulls().to_numpy()
    return QuantileTable.of(seen if seen.size else np.ones(1))


def _framing(later: pl.DataFrame) -> int:
    extra = (later["prompt_tokens"] - later["before"] - later["added"]).drop_nulls().to_numpy()
    return max(0, int(np.median(extra))) if extra.size else 0


def _hits(turns: pl.DataFrame, context: pl.Expr) -> QuantileTable:
    seen = turns.select(pl.col("cached_tokens") / context).to_series().drop_nulls().to_numpy()
    return QuantileTable.of(np.clip(seen, _NO_HIT, 1.0) if seen.size else np.full(1, _NO_HIT))
