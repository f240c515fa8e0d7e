"""The source of a simulated job's lengths: a workload model, or a trace."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist

import numpy as np
import polars as pl
from numpy.typing import NDArray

from rollpacker.polytrace import formats
from rollpacker.polytrace.formats.files import Note, silent
from rollpacker.polytrace.model.lengths import CopulaLengths, Floats, Lengths
from rollpacker.polytrace.model.turns import Scale, TurnModel, fit_turns, response
from rollpacker.polytrace.model.workload import load_model, model_names
from rollpacker.polytrace.numerics import midranks
from rollpacker.polytrace.schema import Trace
from rollpacker.polytrace.statistics import correlations, finished, known_cap, lengths_of
from rollpacker.sim.workload.workload import Recorded, recorded_turns


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardTimes:
    """Seconds of grading one response, and of a step's phase. None if a step has no phase."""

    each_s: float
    phase_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthSource:
    """Lengths of a workload.

    Args:
        recorded: prompts that come first.
        prompt_tokens: mean prompt length. None if unknown.
        prompts, responses: of a step, as recorded. None if unknown.
        turns: model that splits drawn lengths into turns. None if each is one turn.
        tool_tokens: most tokens that tools add to the context of a recorded response.
    """

    lengths: Lengths
    recorded: tuple[Recorded, ...] = ()
    cap: int | None = None
    prompt_tokens: int | None = None
    prompts: int | None = None
    responses: int | None = None
    turns: TurnModel | None = None
    tool_tokens: int = 0
    rewards: RewardTimes | None = None

    def drawn_again(self, rng: np.random.Generator, prompts: int, steps: int) -> LengthSource:
        """Draw the recorded steps anew, with repetition. One freshly drawn step is among them,
        since few steps represent others badly."""
        traits = self.lengths.traits(rng, prompts)
        drawn = self.lengths.given(rng, traits, self.responses or 1)
        fresh = (Recorded(traits[n : n + 1], each) for n, each in enumerate(drawn))
        places = range(0, len(self.recorded), prompts)
        parts: list[tuple[Recorded, ...]] = [self.recorded[at : at + prompts] for at in places]
        parts.append(tuple(fresh))
        chosen: list[int] = rng.integers(len(parts), size=steps).tolist()
        return replace(self, recorded=tuple(each for n in chosen for each in parts[n]))


def load_source(name: str, task: str | None = None, note: Note = silent) -> LengthSource:
    """Load a source by the name of a model, or the path of a model or of a trace. Raises
    ``ValueError`` with one line."""
    if name in model_names() or name.endswith(".json"):
        return of_model(name)
    if not Path(name).exists():
        known = ", ".join(model_names())
        raise ValueError(f"workload={name}: no such file, and no workload model of {known}")
    return of_trace(formats.read(Path(name), note=note).of_training(), task)


def of_model(name: str) -> LengthSource:
    """Make the source of a workload model."""
    model = load_model(name)
    return LengthSource(
        lengths=model.lengths,
        cap=model.lengths.cap,
        prompts=model.prompts,
        responses=model.responses,
        turns=model.turns,
    )


def of_trace(trace: Trace, task: str | None = None) -> LengthSource:
    """Take a trace's prompts, and fit a model for further ones. Raises ``ValueError`` if the
    task is missing, not unique, or has no finished response with tokens."""
    samples = _in_order(_narrow(finished(task_samples(trace, task))))
    if samples.is_empty():
        raise ValueError("the trace has no finished response, so its lengths are unknown")
    tokens = lengths_of(samples)
    if not samples["response_tokens"].cast(pl.Boolean).any():
        raise ValueError("all responses of the trace are empty, so their lengths are unknown")
    groups = samples["visit"].to_numpy().astype(np.int64)
    sizes = np.bincount(groups)
    icc, icc_log = np.nan_to_num(correlations(tokens, groups)).tolist()
    cap = known_cap(samples)
    model = CopulaLengths.matching(tokens, icc, icc_log, cap)
    traits = _posterior(tokens, groups, model.rho, np.random.default_rng([0, 4]))
    ends = np.cumsum(sizes)[:-1]
    rewards = _rewards(samples["reward"], ends)
    turns = fit_turns(samples)
    rows = () if turns is None else samples.iter_rows(named=True)
    played = [recorded_turns(response(row, Scale())) for row in rows]
    mean_prompt = samples["prompt_tokens"].cast(pl.Float64).mean()
    return LengthSource(
        lengths=model,
        recorded=tuple(
            Recorded(
                traits[place : place + 1],
                part.astype(np.int32),
                rewards[place],
                tuple(played[end - part.size : end]),
            )
            for place, (part, end) in enumerate(
                zip(np.split(tokens, ends), np.cumsum(sizes).tolist(), strict=True)
            )
        ),
        cap=cap or int(tokens.max()),
        prompt_tokens=round(mean_prompt) if isinstance(mean_prompt, float) else None,
        prompts=max(1, round(sizes.size / samples["step"].n_unique())),
        responses=max(1, int(np.median(sizes))),
        turns=turns,
        tool_tokens=max((sum(turn.added for turn in each) for each in played), default=0),
        rewards=_reward_times(trace, samples),
    )


def _reward_times(trace: Trace, samples: pl.DataFrame) -> RewardTimes | None:
    """A step's phase takes as long as its slowest rank, which grades its responses in turn."""
    batches = trace.reward_batches.filter(pl.col("task") == samples["task"][0])
    if not batches.is_empty():
        slowest = batches.group_by("step").agg(pl.col("reward_time_s").max())
        phase = float(slowest["reward_time_s"].sum()) / slowest.height
        each = float(batches["reward_time_s"].sum()) / max(1, int(batches["batch_size"].sum()))
        return RewardTimes(each_s=each, phase_s=phase)
    known = samples["reward_s"].drop_nulls()
    return (
        None
        if known.is_empty()
        else RewardTimes(each_s=float(known.sum()) / len(known), phase_s=None)
    )


def _narrow(samples: pl.DataFrame) -> pl.DataFrame:
    """Replace prompts' names by numbers and drop unused columns, to save memory on large logs."""
    return samples.drop("extra", "domain").with_columns(pl.col("prompt").rank("dense"))


def _in_order(samples: pl.DataFrame) -> pl.DataFrame:
    place = pl.col("row").min().over("step", "prompt").alias("place")
    ordered = samples.with_row_index("row").with_columns(place).sort("step", "place", "index")
    return ordered.with_columns((pl.struct("step", "place").rank("dense") - 1).alias("visit"))


def _rewards(column: pl.Series, ends: NDArray[np.int64]) -> list[tuple[float, ...] | None]:
    parts = np.split(column.cast(pl.Float64).to_numpy(), ends)
    return [None if np.isnan(part).any() else tuple(part.tolist()) for part in parts]


def task_samples(trace: Trace, task: str | None) -> pl.DataFrame:
    """Return rows of one task. Raises ``ValueError`` if it is missing, or not the only one."""
    names = trace.tasks
    if task is None and len(names) != 1:
        raise ValueError(
            f"the trace has the tasks {', '.join(names)}: choose one with --task NAME (simulate: "
            "task=NAME)"
        )
    if task is not None and task not in names:
        raise ValueError(f"task {task!r} is not in the trace, which has {', '.join(names)}")
    return trace.samples.filter(pl.col("task") == (task or names[0]))


def _posterior(
    tokens: Floats, groups: NDArray[np.int64], rho: float, rng: np.random.Generator
) -> Floats:
    """Draw each prompt's shared normal given its responses, shape (prompts, 1). Exact for a
    copula without skew: normal scores with correlation ``rho``."""
    levels = (midranks(tokens) - 0.5) / tokens.size
    normal = NormalDist()
    scores = np.fromiter((normal.inv_cdf(level) for level in levels), np.float64, levels.size)
    sizes = np.bincount(groups)
    total = 1.0 - rho + sizes * rho
    centre = np.sqrt(rho) * np.bincount(groups, scores) / total
    spread = np.sqrt((1.0 - rho) / total)
    return (centre + spread * rng.standard_normal(sizes.size))[:, None]
