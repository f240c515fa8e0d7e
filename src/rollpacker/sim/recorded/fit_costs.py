"""Fit costs of CPU workers to a run's measurements, for ``rollpacker calibrate``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollpacker.core.types import NO_DRAFTS, Drafted
from rollpacker.policy.engines.hardware import LatencyCurve
from rollpacker.polytrace.numerics import non_negative
from rollpacker.sim.costs.calibration import Calibration
from rollpacker.sim.costs.costs import DriverCosts
from rollpacker.sim.recorded.run_record import GradientTask, RunRecord, RunStep
from rollpacker.sim.world.step import mean

Floats = NDArray[np.float64]

_KNOTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_NOISE = 20.0  # noise in a sum of decode steps, in steps
_KV_TOKENS = 1 << 30  # no limit, since no run of ours has been seen to lack KV cache


def calibrate(run: RunRecord, steps: Sequence[RunStep] | None = None) -> Calibration:
    """Fit costs to some steps of a run, by default all except the first (it warms up). Raises
    ``ValueError`` if they hold too few measurements."""
    chosen = timed(run) if steps is None else list(steps)
    times = [sums for step in chosen for sums in step.times]
    tasks = [each for step in chosen for each in step.tasks]
    _check(run, times, len(tasks))
    alone = not run.settings["asynchronous_grading"]
    wait_s = mean(s.rollout_end_s - (s.finished[-1].end_s or 0.0) for s in chosen if s.finished)
    grade_s = _grade_s(chosen)
    workers = len(run.steps[0].engines)
    latency, ahead, (context_s, prefill_s, handled_s) = fit_decoding(times, workers, run.cores)
    driver = None
    if run.cores:
        graded_s = _phase_cpu_s(chosen, run.cores) if alone else handled_s / 2
        ended_s = handled_s if alone else handled_s / 2
        driver = DriverCosts(cores=run.cores, ended_s=ended_s, graded_s=graded_s)
    task_s, launch_s, token_s, square_s = fit_gradients(tasks)
    return Calibration.model_validate(
        {
            "name": run.name,
            "device": "cpu",
            "model": run.name,
            "gpus": workers,
            "prompts": run.settings["rollout"]["prompts_per_step"],
            "responses": run.settings["rollout"]["num_generations"],
            "response_cap": run.settings["cap"],
            "prompt_tokens": round(mean(run.prompt_tokens.values())),
            "train_launch_s": launch_s,
            "synchronous_reward_s": wait_s if alone else grade_s,
            "weight_sync_s": mean(s.measured["step"] - _span(s) for s in chosen),
            "apply_s": mean(_apply_s(chosen)),
            "rollout_start_s": mean(_start_s(step) for step in chosen),
            "rewards": {"math_s": wait_s / 2 if alone else grade_s},
            "measured": {
                "latency": _filled(latency, run.settings),
                "kv_tokens": _KV_TOKENS,
                "max_running": run.max_running or 0,
                "prefill_token_s": prefill_s,
                "context_token_s": context_s,
                "train_token_s": token_s,
                "train_square_s": square_s,
                "train_task_s": task_s,
            },
            "ahead": _ahead(chosen) | {"measured": ahead},
            "driver": driver,
            "fitted": _sources(alone, len(chosen), shared=driver is not None, drafted=bool(ahead)),
        }
    )


def _check(run: RunRecord, times: Sequence[Sequence[float]], tasks: int) -> None:
    if not any(step.times for step in run.steps):
        raise ValueError(
            f"{run.name}: its metrics have no engine/step_times, so nothing says what a decode "
            "step takes: run it again"
        )
    if len(times) < len(_KNOTS) or tasks < 4:
        raise ValueError(
            f"{run.name}: {len(times)} sums of decode steps and {tasks} gradient tasks in it: too "
            "few to fit costs, use a longer run"
        )


def _phase_cpu_s(steps: Sequence[RunStep], cores: int) -> float:
    responses = mean(sum(a.reward is not None for a in step.attempts) for step in steps)
    phase_s = mean(s.rollout_end_s - (s.finished[-1].end_s or 0.0) for s in steps if s.finished)
    return min(cores, 2) * phase_s / max(1, responses)


def _ahead(steps: Sequence[RunStep]) -> dict[str, Any]:
    seen = reduce(Drafted.plus, (step.drafts for step in steps), NO_DRAFTS)
    if not seen.accepted:
        return {}
    return {"tokens": seen.tokens, "drafted": math.ceil(seen.drafted / seen.verifications)}


def _filled(latency: dict[int, float], settings: Mapping[str, Any]) -> dict[int, float]:
    """Extend the latency to smaller batches, in the shape of the run's configured curve. If no
    batch decoded one token at a time, that curve is all there is."""
    told = LatencyCurve({int(n): s for n, s in settings["latency"].items()})
    if not latency:
        return dict(told.points)
    least = min(latency)
    small = {
        knot: latency[least] * told.at(knot) / told.at(least) for knot in _KNOTS if knot < least
    }
    return small | latency


def timed(run: RunRecord) -> list[RunStep]:
    """Return the usable steps: all except the first, which warms up, if there are others."""
    return list(run.steps[1:] or run.steps)


def _sources(alone: bool, steps: int, *, shared: bool, drafted: bool) -> dict[str, Any]:
    driver = "what a response that ends adds to the decode steps of its engine"
    other = "assumed: rewards of this run were "
    phase = "time from the last response to the end of the rollout"
    each = "time from a response to its reward"
    ahead = (
        "least squares over the steps of engines that drafted. The latency of so few sequences "
        "has the shape of the run's configured curve"
    )
    return {
        "measured": f"least squares over the decode steps and gradient tasks of {steps} steps",
        "prompt_tokens": "mean of the run",
        "weight_sync_s": "time of a step outside of the journal's first and last event",
        "apply_s": "time from the last gradient, or the rollout's end, to the end of the step",
        "rollout_start_s": "time to an engine's first decode step",
        "synchronous_reward_s": phase if alone else f"{other}graded beside the rollout",
        "rewards": f"{other}graded after the rollout, half of that" if alone else each,
        **({"driver": driver} if shared else {}),
        **({"ahead": ahead} if drafted else {}),
    }


def _span(step: RunStep) -> float:
    assert step.end_s is not None
    return step.end_s - step.told.start_s


def _apply_s(steps: Iterable[RunStep]) -> list[float]:
    return [
        # The last group may not be trained on, and the update waits until that is known.
        step.end_s - max(step.last_gradient_s, step.rollout_end_s)
        for step in steps
        if step.end_s is not None and step.last_gradient_s is not None
    ]


def _start_s(step: RunStep) -> float:
    return max(0.0, step.start_s - min((each.opening_s for each in step.attempts), default=0.0))


def _grade_s(steps: Iterable[RunStep]) -> float:
    return mean(
        each.graded_s - each.end_s
        for step in steps
        for each in step.attempts
        if each.graded_s is not None and each.end_s is not None
    )


def fit_decoding(
    times: Sequence[Sequence[float]], workers: int, cores: int
) -> tuple[dict[int, float], dict[int, float], Floats]:
    """Fit curves of seconds by batch: of a decode step at no context, and of a token with drafts.

    The third result has seconds of a token of context and of a token of prefill. If the driver
    shares ``cores`` (0: none) with the workers, it also has those of a response that ends. The
    curves are piecewise linear and non-decreasing, by non-negative least squares. ``times``: rows
    of ``RunStep.times``.
    """
    ahead, tokens, sequences, context, prefill, ended, seconds = np.array(times, np.float64).T
    batch = sequences / tokens
    plain = ahead == 0.0
    knots = [_knots(batch[of]) for of in (plain, ~plain)]
    curves = [
        _rising(batch, those) * (tokens * of)[:, None]
        for those, of in zip(knots, (plain, ~plain), strict=True)
    ]
    taken = ended * workers / cores if cores else 0.0 * ended
    columns = np.column_stack([*curves, context, prefill, taken])
    found = _fit(columns, seconds, 1.0 / np.sqrt(sequences + 8.0 * tokens + _NOISE))
    ends = np.cumsum([len(those) for those in knots])
    latency, drafted = (
        {knot: float(max(value, 1e-9)) for knot, value in zip(those, np.cumsum(part), strict=True)}
        for those, part in zip(knots, np.split(found, ends)[:2], strict=True)
    )
    return latency, drafted, found[ends[-1] :]


def _knots(batch: Floats) -> list[int]:
    if not batch.size:
        return []
    least, largest = int(batch.min()), math.ceil(batch.max())
    return [least, *(knot for knot in _KNOTS if least < knot < largest), *{largest} - {least}]


def _rising(batch: Floats, knots: Sequence[int]) -> Floats:
    """Column k rises from 0 at knot k - 1 to 1 at knot k and stays there. Column 0 is 1."""
    if not knots:
        return np.empty((batch.size, 0))
    columns = [np.ones(batch.size)]
    for low, high in pairwise(knots):
        columns.append(np.clip((batch - low) / (high - low), 0.0, 1.0))
    return np.column_stack(columns)


def fit_gradients(tasks: Sequence[GradientTask]) -> tuple[float, float, float, float]:
    """Return seconds of a task, and of each response, token and squared token in it."""
    design = np.array(
        [
            [1.0, len(t.lengths), float(sum(t.lengths)), float(sum(n * n for n in t.lengths))]
            for t in tasks
        ]
    )
    seconds = np.array([each.seconds for each in tasks])
    weights = 1.0 / np.sqrt(design[:, 2] + float(design[:, 2].mean()))
    task_s, launch_s, token_s, square_s = _fit(design, seconds, weights).tolist()
    return task_s, launch_s, token_s, square_s


def _fit(design: Floats, seconds: Floats, weights: Floats) -> Floats:
    """Non-negative least squares. Columns are scaled, since their units differ widely."""
    scale = np.abs(design).max(axis=0)
    scale[scale == 0.0] = 1.0
    return non_negative(design / scale * weights[:, None], seconds * weights) / scale
