"""Synthetic workloads from a model."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from rollpacker.polytrace.numerics import normal_cdf
from rollpacker.polytrace.schema import REWARD_BATCHES, SAMPLES, Trace
from rollpacker.polytrace.workload import WorkloadModel

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Shape:
    steps: int
    prompts: int
    responses: int

    @property
    def rows(self) -> int:
        return self.steps * self.prompts * self.responses

    def visit(self) -> Ints:
        """Visit of each row: a prompt in a step."""
        return np.arange(self.rows) // self.responses

    def step(self) -> Ints:
        return np.arange(self.rows) // (self.prompts * self.responses)


def generate(
    model: WorkloadModel,
    *,
    steps: int,
    prompts: int | None = None,
    responses: int | None = None,
    seed: int = 0,
) -> Trace:
    """A workload of fresh prompts; the same arguments give the same trace.

    Args:
        model: what to sample from.
        steps: steps, numbered from 0.
        prompts: prompts a step; the model's own number by default.
        responses: responses a prompt; the model's own number by default.
        seed: of all randomness.
    """
    chosen = (steps, prompts or model.prompts, responses or model.responses)
    if min(chosen) < 1:
        raise ValueError(f"steps, prompts and responses must be at least 1, got {chosen}")
    shape = _Shape(*chosen)
    rng = np.random.default_rng(seed)
    traits = model.lengths.traits(rng, shape.steps * shape.prompts)
    prompt_tokens = _prompt_tokens(model, rng, traits[:, 0])[shape.visit()]
    lengths = model.lengths.given(rng, traits, shape.responses).ravel()
    response_tokens = _drifted(model, lengths, shape.step())
    columns: dict[str, object] = {
        "task": [model.task] * shape.rows,
        "step": shape.step(),
        "prompt": [f"{model.task}-{number}" for number in shape.visit().tolist()],
        "index": np.arange(shape.rows) % shape.responses,
        "domain": [model.task] * shape.rows,
        "prompt_tokens": prompt_tokens,
        "response_tokens": response_tokens,
        "state": ["kept"] * shape.rows,
    }
    cap = model.lengths.cap
    if cap is not None:
        columns |= {"cap": [cap] * shape.rows, "truncated": response_tokens >= cap}
    if model.turns is not None:
        turns, tools = model.turns.sample(rng, prompt_tokens, response_tokens)
        columns |= {"turns": turns, "tools": tools}
    batches = _rewards(model, rng, shape, columns)
    return Trace(samples=_table(columns, SAMPLES), reward_batches=_table(batches, REWARD_BATCHES))


def _prompt_tokens(
    model: WorkloadModel, rng: np.random.Generator, level: NDArray[np.float64]
) -> Ints:
    own = rng.standard_normal(level.size)
    rho = model.prompt.correlation
    score = rho * level + np.sqrt(1.0 - rho**2) * own
    return np.maximum(np.rint(model.prompt.tokens.at(normal_cdf(score))), 1.0).astype(np.int64)


def _drifted(model: WorkloadModel, lengths: NDArray[np.int32], step: Ints) -> Ints:
    last = model.drift.steps - 1
    since = np.clip(step, 0, last) - last / 2.0
    longest = model.lengths.cap or np.iinfo(np.int32).max
    scaled = np.rint(lengths * np.exp(model.drift.slope * since))
    return np.clip(scaled, 1, longest).astype(np.int64)


def _rewards(
    model: WorkloadModel, rng: np.random.Generator, shape: _Shape, columns: dict[str, object]
) -> dict[str, object]:
    """Adds the columns of rewards; returns the table of batches."""
    rewards = model.rewards
    if rewards is None:
        return {}
    if rewards.response_s is not None:
        columns["reward_s"] = rewards.response_s.sample(rng, shape.rows)
        columns["reward_kind"] = [rewards.kind] * shape.rows
    if rewards.batch_s is None:
        return {}
    place = (np.arange(shape.rows) // shape.responses) % shape.prompts
    columns["dp_rank"] = place * rewards.ranks // shape.prompts
    ranks = np.tile(np.arange(rewards.ranks), shape.steps)
    own = np.bincount(
        columns["dp_rank"][: shape.prompts * shape.responses], minlength=rewards.ranks
    )
    size = own[ranks]
    return {
        "task": [model.task] * ranks.size,
        "step": np.repeat(np.arange(shape.steps), rewards.ranks),
        "dp_rank": ranks,
        "batch_size": size,
        "reward_time_s": size * rewards.batch_s.sample(rng, ranks.size),
    }


def _table(columns: dict[str, object], schema: dict[str, pl.DataType]) -> pl.DataFrame:
    """A frame of this schema; columns that are not given are null."""
    if not columns:
        return pl.DataFrame(schema=schema)
    given = pl.DataFrame(columns)
    return given.select(
        (pl.col(name) if name in columns else pl.lit(None)).cast(dtype).alias(name)
        for name, dtype in schema.items()
    )
