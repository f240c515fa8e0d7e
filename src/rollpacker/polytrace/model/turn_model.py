"""Turns and tool calls of multi-turn responses: how a length is split, what the tools add."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from rollpacker.polytrace.model.turns import TraceResponse, TraceTurn
from rollpacker.polytrace.schema import TOOL, TURN
from rollpacker.polytrace.statistics.quantiles import QuantileTable

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Drawn:
    """One entry a turn, and from ``owner`` on one a call; ``owner``: its turn's place."""

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
        levels: upper ends of the length classes, tokens, increasing; the last class is open.
        turns: chance of 1, 2, ... turns in each class, shape (classes, most turns).
        shares: of the generated tokens by turn, for 1, 2, ... turns.
        concentration: of the Dirichlet around the shares, for 1, 2, ... turns.
        calls: chance of 0, 1, ... tool calls in a turn that is not the last.
        tool_tokens: tokens that a call puts into the context.
        tool_latency_s: seconds of a call.
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
        """Columns ``turns`` and ``tools`` of responses, their completions summing to the length."""
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
        """The same draw as responses to replay; the calls of a turn are made at once."""
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
    """One list of structs a sample, empty where it has none."""
    names = [each.name for each in dtype.fields]
    nested = rows.select("sample", pl.struct(names).cast(dtype).alias("row"))
    lists = nested.group_by("sample", maintain_order=True).agg("row")
    every = pl.DataFrame({"sample": np.arange(samples)}).join(lists, on="sample", how="left")
    empty = pl.lit([], dtype=pl.List(dtype))
    return every.sort("sample").select(pl.col("row").fill_null(empty)).to_series()
