"""Synthetic workloads from a model."""

from __future__ import annotations

import numpy as np
import polars as pl
from numpy.typing import NDArray

from rollpacker.polytrace.model.workload import WorkloadModel
from rollpacker.polytrace.schema import REWARD_BATCHES, SAMPLES, Trace
from rollpacker.polytrace.statistics.numerics import normal_cdf

Ints = NDArray[np.int64]


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
    _, prompts, responses = chosen
    place = np.arange(steps * prompts * responses)
    visit, step = place // responses, place // (prompts * responses)
    rng = np.random.default_rng(seed)
    traits = model.lengths.traits(rng, steps * prompts)
    prompt_tokens = _prompt_tokens(model, rng, traits[:, 0])[visit]
    lengths = model.lengths.given(rng, traits, responses).ravel()
    response_tokens = _drifted(model, lengths, step)
    columns: dict[str, object] = {
        "task": [model.task] * place.size,
        "step": step,
        "prompt": [f"{model.task}-{number}" for number in visit.tolist()],
        "index": place % responses,
        "domain": [model.task] * place.size,
        "prompt_tokens": prompt_tokens,
        "response_tokens": response_tokens,
        "state": ["kept"] * place.size,
    }
    cap = model.lengths.cap
    if cap is not None:
        columns |= {"cap": [cap] * place.size, "truncated": response_tokens >= cap}
    if model.turns is not None:
        turns, tools = model.turns.sample(rng, prompt_tokens, response_tokens)
        columns |= {"turns": turns, "tools": tools}
    batches = _rewards(model, rng, chosen, columns)
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
    model: WorkloadModel,
    rng: np.random.Generator,
    shape: tuple[int, int, int],
    columns: dict[str, object],
) -> dict[str, object]:
    """Adds the columns of rewards; returns the table of batches."""
    rewards = model.rewards
    if rewards is None:
        return {}
    steps, prompts, responses = shape
    rows = steps * prompts * responses
    if rewards.response_s is not None:
        columns["reward_s"] = rewards.response_s.sample(rng, rows)
        columns["reward_kind"] = [rewards.kind] * rows
    if rewards.batch_s is None:
        return {}
    place = (np.arange(rows) // responses) % prompts
    columns["dp_rank"] = place * rewards.ranks // prompts
    ranks = np.tile(np.arange(rewards.ranks), steps)
    own = np.bincount(columns["dp_rank"][: prompts * responses], minlength=rewards.ranks)
    size = own[ranks]
    return {
        "task": [model.task] * ranks.size,
        "step": np.repeat(np.arange(steps), rewards.ranks),
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
