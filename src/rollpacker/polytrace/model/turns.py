"""The turns of a response: recorded ones, scaled, and a fitted model of them.

A length of ``n`` tokens becomes ``max(1, round(scale * n))``, and 0 stays 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from rollpacker.polytrace.schema import TOOL, TURN
from rollpacker.polytrace.statistics import QuantileTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Factors of a replay. ``tokens``: of every length, including prompts. ``time``: of the
    latencies of tools and rewards."""

    tokens: float = 1.0
    time: float = 1.0

    def length(self, recorded: int) -> int:
        return max(1, round(self.tokens * recorded)) if recorded > 0 else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceTurn:
    """One request to the engine.

    Args:
        prompt: tokens of the whole context before it, at least 1.
        tokens: to generate.
        cached: of ``prompt``, found in the prefix cache when it was recorded.
        tool_s: seconds until its tools have answered.
    """

    prompt: int
    tokens: int
    cached: int = 0
    tool_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceResponse:
    """One response: its turns in order, and seconds from its end to its reward."""

    turns: tuple[TraceTurn, ...]
    reward_s: float = 0.0

    @property
    def tokens(self) -> int:
        return sum(turn.tokens for turn in self.turns)


def response(row: dict[str, Any], scale: Scale) -> TraceResponse:
    """Convert a row of ``SAMPLES``."""
    reward_s = scale.time * (row["reward_s"] or 0.0)
    turns: Sequence[dict[str, Any]] = row["turns"] or []
    if not turns:
        alone = TraceTurn(
            prompt=scale.length(max(1, row["prompt_tokens"] or 0)),
            tokens=scale.length(row["response_tokens"]),
        )
        return TraceResponse(turns=(alone,), reward_s=reward_s)
    tools = _tools(row["tools"] or [], len(turns))
    made: list[TraceTurn] = []
    context = row["prompt_tokens"] or 0
    for place, turn in enumerate(turns):
        if turn["prompt_tokens"] is not None:
            context = turn["prompt_tokens"]
        calls = tools[place]
        made.append(
            TraceTurn(
                prompt=scale.length(max(1, context)),
                tokens=scale.length(turn["completion_tokens"]),
                cached=round(scale.tokens * (turn["cached_tokens"] or 0)),
                # A turn's calls are made at once.
                tool_s=scale.time * max((call["latency_s"] or 0.0 for call in calls), default=0.0),
            )
        )
        context += turn["completion_tokens"] + sum(call["tokens"] or 0 for call in calls)
    return TraceResponse(turns=tuple(made), reward_s=reward_s)


def _tools(calls: Sequence[dict[str, Any]], turns: int) -> list[list[dict[str, Any]]]:
    """A call without a turn belongs to the turn of its own position."""
    found: list[list[dict[str, Any]]] = [[] for _ in range(turns)]
    for place, call in enumerate(calls):
        turn = place if call["turn"] is None else call["turn"]
        found[min(turn, turns - 1)].append(call)
    return found


# --- The model of turns: how a length is split, and what tools add

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Drawn:
    """One entry per turn, and from ``owner`` on one per call. ``owner``: its turn's place."""

    sample: Ints
    turn: Ints
    last: NDArray[np.bool_]
    context: Ints
    cached: Ints
    completion: Ints
    owner: Ints
    tool_tokens: Ints
    name: NDArray[np.str_]
    latency_s: Floats
    status: NDArray[np.str_]


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnModel:
    """Turns given the generated tokens of a response.

    Args:
        levels: upper ends of the length classes, tokens, increasing. The last class is open.
        turns: chance of 1, 2, ... turns in each class, shape (classes, most turns).
        shares: of the generated tokens by turn, for 1, 2, ... turns.
        concentration: of the Dirichlet around the shares, for 1, 2, ... turns.
        calls: chance of 0, 1, ... tool calls in a turn that is not the last.
        tool_tokens: tokens that a call adds to the context.
        framing: tokens that the chat template adds between turns.
        cached_first: share of the first turn's prompt found in the prefix cache.
        cached_later: share of the earlier context found there at a later turn.
    """

    levels: tuple[float, ...]
    turns: tuple[tuple[float, ...], ...]
    shares: tuple[tuple[float, ...], ...]
    concentration: tuple[float, ...]
    calls: tuple[float, ...]
    tools: dict[str, float]
    statuses: dict[str, float]
    tool_tokens: QuantileTable
    tool_latency_s: QuantileTable
    framing: int
    cached_first: QuantileTable
    cached_later: QuantileTable

    def sample(
        self, rng: np.random.Generator, prompt_tokens: Ints, response_tokens: Ints
    ) -> tuple[pl.Series, pl.Series]:
        drawn = self._draw(rng, prompt_tokens, response_tokens)
        turns = pl.DataFrame(
            {
                "sample": drawn.sample,
                "prompt_tokens": drawn.context,
                "cached_tokens": drawn.cached,
                "completion_tokens": drawn.completion,
                "finish_reason": np.where(drawn.last, "stop", "tool_calls"),
                "latency_s": pl.Series([None] * drawn.sample.size, dtype=pl.Float64),
            }
        )
        tools = pl.DataFrame(
            {
                "sample": drawn.sample[drawn.owner],
                "turn": drawn.turn[drawn.owner],
                "name": drawn.name,
                "latency_s": drawn.latency_s,
                "tokens": drawn.tool_tokens,
                "status": drawn.status,
            }
        )
        samples = response_tokens.size
        return _lists(turns, TURN, samples), _lists(tools, TOOL, samples)

    def responses(
        self, rng: np.random.Generator, prompt_tokens: Ints, response_tokens: Ints
    ) -> list[TraceResponse]:
        """Return the same draw as responses to replay. The calls of a turn are made at once."""
        drawn = self._draw(rng, prompt_tokens, response_tokens)
        waits = np.zeros(drawn.sample.size)
        np.maximum.at(waits, drawn.owner, drawn.latency_s)
        found: list[list[TraceTurn]] = [[] for _ in range(response_tokens.size)]
        for place, sample in enumerate(drawn.sample):
            turn = TraceTurn(
                prompt=int(drawn.context[place]),
                tokens=int(drawn.completion[place]),
                cached=int(drawn.cached[place]),
                tool_s=float(waits[place]),
            )
            found[int(sample)].append(turn)
        return [TraceResponse(turns=tuple(turns)) for turns in found]

    def _draw(self, rng: np.random.Generator, prompt_tokens: Ints, response_tokens: Ints) -> _Drawn:
        count = self._counts(rng, response_tokens)
        sample = np.repeat(np.arange(count.size), count)
        turn = np.arange(sample.size) - np.repeat(np.cumsum(count) - count, count)
        last = turn + 1 == count[sample]
        completion = self._split(rng, response_tokens, count)
        calls = np.where(
            last, 0, rng.choice(len(self.calls), sample.size, p=_sums_to_1(self.calls))
        )
        owner = np.repeat(np.arange(sample.size), calls)
        tool_tokens = np.rint(self.tool_tokens.sample(rng, owner.size)).astype(np.int64)
        added = np.bincount(owner, tool_tokens, sample.size).astype(np.int64)
        grown = np.cumsum(completion + added + self.framing)
        before = grown - (completion + added + self.framing)
        context = prompt_tokens[sample] + before - before[np.flatnonzero(turn == 0)][sample]
        earlier = context - np.where(turn > 0, np.roll(added, 1) + self.framing, 0)
        hit = np.where(
            turn == 0,
            self.cached_first.sample(rng, sample.size),
            self.cached_later.sample(rng, sample.size),
        )
        return _Drawn(
            sample=sample,
            turn=turn,
            last=last,
            context=context,
            cached=(np.clip(hit, 0.0, 1.0) * earlier).astype(np.int64),
            completion=completion,
            owner=owner,
            tool_tokens=tool_tokens,
            name=_names(rng, self.tools, owner.size),
            latency_s=self.tool_latency_s.sample(rng, owner.size),
            status=_names(rng, self.statuses, owner.size),
        )

    def _counts(self, rng: np.random.Generator, response_tokens: Ints) -> Ints:
        chances = np.array([_sums_to_1(row) for row in self.turns]).cumsum(axis=1)
        rows = chances[np.searchsorted(self.levels, response_tokens)]
        count = (rng.random((response_tokens.size, 1)) > rows).sum(axis=1) + 1
        most = np.minimum(chances.shape[1], np.maximum(response_tokens, 1))
        return np.minimum(count, most)

    def _split(self, rng: np.random.Generator, response_tokens: Ints, count: Ints) -> Ints:
        """Completion tokens of every turn, at least one each, flat."""
        flat = np.zeros(int(count.sum()), np.int64)
        starts = np.cumsum(count) - count
        for turns in range(1, int(count.max()) + 1):
            chosen = np.flatnonzero(count == turns)
            centre = _sums_to_1(self.shares[turns - 1]) * self.concentration[turns - 1]
            share = rng.dirichlet(centre, chosen.size).cumsum(axis=1)
            free = np.maximum(response_tokens[chosen] - turns, 0)
            ends = np.rint(share * free[:, None]).astype(np.int64)
            parts = np.diff(ends, axis=1, prepend=0) + 1
            flat[starts[chosen][:, None] + np.arange(turns)] = parts
        return flat


def _sums_to_1(chances: tuple[float, ...]) -> Floats:
    weights = np.asarray(chances, np.float64)
    return weights / weights.sum()


def _names(rng: np.random.Generator, shares: dict[str, float], size: int) -> NDArray[np.str_]:
    return rng.choice(list(shares), size, p=_sums_to_1(tuple(shares.values())))


def _lists(rows: pl.DataFrame, dtype: pl.Struct, samples: int) -> pl.Series:
    names = [each.name for each in dtype.fields]
    nested = rows.select("sample", pl.struct(names).cast(dtype).alias("row"))
    lists = nested.group_by("sample", maintain_order=True).agg("row")
    every = pl.DataFrame({"sample": np.arange(samples)}).join(lists, on="sample", how="left")
    empty = pl.lit([], dtype=pl.List(dtype))
    return every.sort("sample").select(pl.col("row").fill_null(empty)).to_series()


# --- Fitting it

_CLASSES = (0.2, 0.4, 0.6, 0.8, 0.9)
_NO_HIT = 1e-6


def fit_turns(samples: pl.DataFrame) -> TurnModel | None:
    """Fit the turns of one task's responses. None if all have one turn and no tool call."""
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
        tools=_shares_of(tools["name"]),
        statuses=_shares_of(tools["status"]),
        tool_tokens=_table(tools["tokens"]),
        tool_latency_s=_table(tools["latency_s"]),
        framing=_framing(later),
        cached_first=_hits(turns.filter(pl.col("turn") == 0), pl.col("prompt_tokens")),
        cached_later=_hits(later, pl.col("before")),
    )


def _turn_rows(known: pl.DataFrame) -> pl.DataFrame:
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


def _shares_of(names: pl.Series) -> dict[str, float]:
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
