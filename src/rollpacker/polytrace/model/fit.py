"""Fit the parameters of a synthetic workload to a trace, and measure the fit."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import polars as pl
from numpy.typing import NDArray

from rollpacker.polytrace.model.lengths import CopulaLengths
from rollpacker.polytrace.model.turns import fit_turns
from rollpacker.polytrace.model.workload import (
    DriftModel,
    PromptModel,
    RewardModel,
    WorkloadModel,
    generate,
)
from rollpacker.polytrace.numerics import distance, midranks
from rollpacker.polytrace.schema import Trace, TraceError
from rollpacker.polytrace.statistics import (
    QuantileTable,
    correlations,
    drift,
    finished,
    known_cap,
    lengths_of,
    visits,
)

Floats = NDArray[np.float64]

_SURE_OF_DRIFT = 0.01
_LEVELS = {"p50": 0.5, "p75": 0.75, "p90": 0.9, "p95": 0.95, "p99": 0.99}
_SAMPLED = 200_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodness:
    """A large generated sample against the trace.

    Args:
        ks: largest distance of the two cumulative distributions (Kolmogorov and Smirnov).
        mean_error: generated over measured, minus 1. ``quantile_error``: the same by ``p50`` to
            ``p99``.
        icc: of the trace. NaN if prompts have one response.
        icc_error: generated minus measured.
    """

    responses: int
    ks: float
    mean_error: float
    quantile_error: dict[str, float]
    icc: float
    icc_error: float
    icc_log: float
    icc_log_error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A fitted model and its goodness of fit."""

    model: WorkloadModel
    goodness: Goodness


def fit(trace: Trace) -> dict[str, Fit]:
    """Fit every task of a trace without aborted responses. Raises ``TraceError`` if a task has
    no finished response."""
    return {task: _fit_task(task, trace) for task in trace.tasks}


def _fit_task(task: str, trace: Trace) -> Fit:
    samples = finished(trace.samples.filter(pl.col("task") == task)).sort("step", "prompt", "index")
    if samples.height == 0:
        raise TraceError(f"task {task!r}: no finished response to fit")
    cap = known_cap(samples)
    groups = visits(samples)
    trend = _trend(samples)
    tokens = lengths_of(samples)
    steps = samples["step"].to_numpy()
    since = steps - steps.min() - (trend.steps - 1) / 2.0
    level = tokens / np.exp(trend.slope * since)
    icc, icc_log = np.nan_to_num(correlations(level, groups)).tolist()
    steps = samples["step"].n_unique()
    sizes = np.bincount(groups)
    model = WorkloadModel(
        task=task,
        lengths=CopulaLengths.matching(level, icc, icc_log, cap),
        prompt=_prompts(samples, groups, np.log(level), icc_log),
        prompts=max(1, round(sizes.size / steps)),
        responses=int(np.median(sizes)),
        drift=trend,
        turns=fit_turns(samples),
        rewards=_rewards(task, trace, samples),
        source=f"{samples.height} responses of {sizes.size} prompts over {steps} steps",
    )
    return Fit(model=model, goodness=goodness_of_fit(model, samples))


def _trend(samples: pl.DataFrame) -> DriftModel:
    steps = samples["step"].to_numpy()
    span = int(steps.max() - steps.min()) + 1
    found = drift(samples)
    if found is None or found.slope_p >= _SURE_OF_DRIFT:
        return DriftModel(slope=0.0, steps=span)
    return DriftModel(slope=round(found.slope, 6), steps=span)


def _prompts(
    samples: pl.DataFrame, groups: NDArray[np.int64], logs: Floats, icc_log: float
) -> PromptModel:
    sizes = np.bincount(groups)
    tokens = np.zeros(sizes.size)
    tokens[groups] = samples["prompt_tokens"].fill_null(1).to_numpy()
    table = QuantileTable.of(np.maximum(tokens, 1.0))
    if sizes.size < 3 or np.ptp(tokens) == 0.0 or np.ptp(logs) == 0.0:
        return PromptModel(tokens=table)
    ranks = np.corrcoef(midranks(tokens), midranks(np.bincount(groups, logs) / sizes))[0, 1]
    pearson = 2.0 * np.sin(np.pi * ranks / 6.0)
    # A group's mean is a noisy measurement of its level: undo the attenuation.
    size = float(sizes.mean())
    reliability = size * icc_log / (1.0 + (size - 1.0) * icc_log) if icc_log > 0.0 else 0.0
    correlation = pearson / np.sqrt(reliability) if reliability > 0.0 else 0.0
    return PromptModel(tokens=table, correlation=round(float(np.clip(correlation, -1, 1)), 4))


def _rewards(task: str, trace: Trace, samples: pl.DataFrame) -> RewardModel | None:
    single = samples["reward_s"].drop_nulls()
    batches = trace.reward_batches.filter((pl.col("task") == task) & (pl.col("batch_size") > 0))
    if single.len() == 0 and batches.height == 0:
        return None
    kinds = samples["reward_kind"].drop_nulls()
    a_response = (batches["reward_time_s"] / batches["batch_size"]).to_numpy()
    return RewardModel(
        response_s=QuantileTable.of(single.to_numpy()) if single.len() else None,
        batch_s=QuantileTable.of(a_response) if batches.height else None,
        ranks=max(1, batches["dp_rank"].n_unique()),
        kind=str(kinds[0]) if kinds.len() else None,
    )


def goodness_of_fit(model: WorkloadModel, samples: pl.DataFrame, seed: int = 0) -> Goodness:
    """Compare a large generated sample of ``model`` with the responses of one task."""
    samples = finished(samples)
    steps = max(1, model.drift.steps)
    responses = max(2, model.responses)
    prompts = max(1, _SAMPLED // (steps * responses))
    bare = replace(model, prompts=prompts, responses=responses, turns=None, rewards=None)
    made = generate(bare, steps=steps, seed=seed).samples
    ours, theirs = lengths_of(made), lengths_of(samples)
    icc, icc_log = correlations(theirs, visits(samples))
    icc_made, icc_log_made = correlations(ours, visits(made))
    return Goodness(
        responses=samples.height,
        ks=distance(ours, theirs),
        mean_error=float(ours.mean() / theirs.mean() - 1.0),
        quantile_error={
            name: float(np.quantile(ours, level) / np.quantile(theirs, level) - 1.0)
            for name, level in _LEVELS.items()
        },
        icc=icc,
        icc_error=icc_made - icc,
        icc_log=icc_log,
        icc_log_error=icc_log_made - icc_log,
    )
