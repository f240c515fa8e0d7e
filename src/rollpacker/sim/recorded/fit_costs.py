"""Costs of CPU workers, fitted to a run's own journal: what ``rollpacker calibrate`` writes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollpacker.core.types import NO_DRAFTS, Drafted
from rollpacker.policy.engines.hardware import LatencyCurve
from rollpacker.polytrace.numerics import least_squares
from rollpacker.sim.costs.calibration import Calibration
from rollpacker.sim.costs.costs import DriverCosts
from rollpacker.sim.recorded.run_reader import First, GradientTask, Interval, RunStep
from rollpacker.sim.recorded.run_record import RunRecord
from rollpacker.sim.world.step import mean

Floats = NDArray[np.float64]

_KNOTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_NOISE = 20.0
"""Steps' worth of noise in the length of an interval: messages and the driver."""
_FORWARD = 1 / 3
"""Share of the forward pass in a token's gradient: what its prefill is taken to cost."""
_KV_TOKENS = 1 << 30
"""No run of ours has been seen to lack KV cache: no limit."""


def calibrate(run: RunRecord, steps: Sequence[RunStep] | None = None) -> Calibration:
    """Fit costs to some steps of a run, by default all but the first (it warms up).

    Raises ``ValueError`` when they hold too few measurements.
    """
    chosen = timed(run) if steps is None else list(steps)
    intervals = [each for step in chosen for each in step.intervals]
    tasks = [each for step in chosen for each in step.tasks]
    _check(run, len(intervals), len(tasks))
    alone = not run.settings["asynchronous_grading"]
    wait_s = mean(step.rollout_end_s - step.last_end_s for step in chosen)
    grade_s = _grade_s(chosen)
    decoding = fit_decoding(intervals, run.cores)
    latency, driver = _filled(decoding.latency, run.settings), decoding.driver
    if alone and driver is not None:
        driver = driver.model_copy(update={"graded_s": _phase_cpu_s(chosen, driver.cores)})
    task_s, launch_s, token_s, square_s = fit_gradients([(t, _spent(t, driver)) for t in tasks])
    prefill_s = _FORWARD * token_s if decoding.prefill_s is None else decoding.prefill_s
    firsts = [(f, _spent(f, driver)) for s in chosen for f in s.firsts]
    start_s = _start_s(firsts, decoding, latency, prefill_s)
    first = run.steps[0]
    return Calibration.model_validate(
        {
            "name": run.name,
            "device": "cpu",
            "model": run.name,
            "gpus": len(first.engines),
            "prompts": run.settings["rollout"]["prompts_per_step"],
            "responses": run.settings["rollout"]["num_generations"],
            "response_cap": run.settings["cap"],
            "prompt_tokens": round(mean(run.prompt_tokens.values())),
            "train_launch_s": launch_s,
            "synchronous_reward_s": wait_s if alone else grade_s,
            "weight_sync_s": mean(s.measured["step"] - _span(s) for s in chosen),
            "apply_s": mean(_apply_s(chosen)),
            "rollout_start_s": start_s,
            "rewards": {"math_s": wait_s / 2 if alone else grade_s},
            "measured": {
                "latency": latency,
                "kv_tokens": _KV_TOKENS,
                "max_running": run.max_running or 0,
                "prefill_token_s": prefill_s,
                "context_token_s": decoding.context_token_s,
                "train_token_s": token_s,
                "train_square_s": square_s,
                "train_task_s": task_s,
            },
            "ahead": _ahead(chosen) | {"measured": decoding.ahead},
            "driver": driver,
            "fitted": _sources(
                alone,
                len(chosen),
                shared=driver is not None,
                drafted=bool(decoding.ahead),
                turns=decoding.prefill_s is not None,
            ),
        }
    )


def _check(run: RunRecord, intervals: int, tasks: int) -> None:
    if intervals < 2 * len(_KNOTS) or tasks < 4:
        raise ValueError(
            f"{run.name}: {intervals} stretches of decoding and {tasks} gradient tasks in it: too "
            "few to fit costs, use a longer run"
        )


def _spent(measured: First | GradientTask, driver: DriverCosts | None) -> float:
    """Seconds of it without those that the driver took."""
    if driver is None:
        return measured.seconds
    handled = measured.handled
    lost = driver.ended_s * handled.ended + driver.graded_s * handled.graded
    return max(0.0, measured.seconds - lost / driver.cores)


def _phase_cpu_s(steps: Sequence[RunStep], cores: int) -> float:
    """CPU seconds of a reward where nothing but rewards is computed: they keep the driver and a
    grading process busy."""
    responses = mean(sum(t.reward is not None for t in s.attempts.values()) for s in steps)
    return min(cores, 2) * mean(s.rollout_end_s - s.last_end_s for s in steps) / max(1, responses)


def _ahead(steps: Sequence[RunStep]) -> dict[str, Any]:
    seen = reduce(Drafted.plus, (step.drafts for step in steps), NO_DRAFTS)
    if not seen.accepted:
        return {}
    return {"tokens": seen.tokens, "drafted": math.ceil(seen.drafted / seen.verifications)}


def _filled(latency: dict[int, float], settings: Mapping[str, Any]) -> dict[int, float]:
    """Smaller batches than any that decoded a token at a time have the shape of the curve that the
    run was told; where none did, that is all there is."""
    told = LatencyCurve({int(n): s for n, s in settings["latency"].items()})
    if not latency:
        return dict(told.points)
    least = min(latency)
    small = {
        knot: latency[least] * told.at(knot) / told.at(least) for knot in _KNOTS if knot < least
    }
    return small | latency


def timed(run: RunRecord) -> list[RunStep]:
    """The steps that tell something: the first one warms up, if there are others."""
    return list(run.steps[1:] or run.steps)


def _sources(
    alone: bool, steps: int, *, shared: bool, drafted: bool, turns: bool
) -> dict[str, Any]:
    """Where each value is from."""
    driver = "stretches of decoding, by what the driver handled in them"
    other = "assumed: rewards of this run were "
    phase = "time from the last response to the end of the rollout"
    each = "time from a response to its reward"
    ahead = (
        "least squares over stretches in which engines drafted; the latency of so few sequences "
        "has the shape of the curve that the run was told"
    )
    prefill = "fitted to turns" if turns else "a third of its gradient, assumed"
    return {
        "measured": f"least squares over stretches of decoding and gradient tasks of {steps} steps",
        "prompt_tokens": f"mean of the run; a token's prefill is {prefill}",
        "weight_sync_s": "time of a step outside of the journal's first and last event",
        "apply_s": "time from the last gradient, or the rollout's end, to the end of the step",
        "rollout_start_s": "first responses, less their decoding",
        "synchronous_reward_s": phase if alone else f"{other}graded beside the rollout",
        "rewards": f"{other}graded after the rollout; half of that" if alone else each,
        **({"driver": driver} if shared else {}),
        **({"ahead": ahead} if drafted else {}),
    }


def _span(step: RunStep) -> float:
    assert step.end_s is not None
    return step.end_s - step.start_s


def _apply_s(steps: Iterable[RunStep]) -> list[float]:
    return [
        # The last group may be one that is not trained on: nothing is updated before that is known.
        step.end_s - max(step.last_gradient_s, step.rollout_end_s)
        for step in steps
        if step.end_s is not None and step.last_gradient_s is not None
    ]


def _grade_s(steps: Iterable[RunStep]) -> float:
    return mean(
        each.graded_s - each.end_s
        for step in steps
        for each in step.attempts.values()
        if each.graded_s is not None and each.end_s is not None
    )


class DecodeTimes(NamedTuple):
    """Seconds of decode steps.

    Args:
        latency: by batch at no context, from the smallest that was seen on.
        ahead: of a token of each of so many sequences that decode ahead; empty where none did.
        context_token_s: what each token of context adds.
        prefill_s: of a token that a turn brought; None where none did.
        driver: what it takes from cores that it shares; None where it does not.
    """

    latency: dict[int, float]
    ahead: dict[int, float]
    context_token_s: float
    prefill_s: float | None
    driver: DriverCosts | None


def fit_decoding(intervals: Sequence[Interval], cores: int) -> DecodeTimes:
    """Costs of decode steps, where the driver shares so many ``cores`` (0: none).

    Non-negative least squares on piecewise linear, non-decreasing curves.
    """
    batch = np.array([each.batch for each in intervals], np.float64)
    steps = np.array([each.steps for each in intervals], np.float64)
    context = np.array([each.context for each in intervals])
    seconds = np.array([each.seconds for each in intervals])
    ahead = np.array([each.ahead for each in intervals])
    knots = [_knots(batch[of]) for of in (~ahead, ahead)]
    curves = [
        _rising(batch, those) * (steps * of)[:, None]
        for those, of in zip(knots, (~ahead, ahead), strict=True)
    ]
    prefill = np.array([each.prefill for each in intervals], np.float64)
    handled = np.array([[each.handled.ended, each.handled.graded] for each in intervals])
    taken = handled / max(1, cores)
    columns = np.column_stack([*curves, context * steps, prefill, taken])
    seen = np.flatnonzero(columns.any(axis=0))
    weights = 1.0 / np.sqrt(steps * (batch + 8.0) + _NOISE)
    found = np.zeros(columns.shape[1])
    found[seen] = _fit(columns[:, seen], seconds, weights)
    ends = np.cumsum([len(those) for those in knots])
    latency, drafted = (
        {knot: float(max(value, 1e-9)) for knot, value in zip(those, np.cumsum(part), strict=True)}
        for those, part in zip(knots, np.split(found, ends)[:2], strict=True)
    )
    context_s, prefill_s, ended_s, graded_s = found[ends[-1] :].tolist()
    driver = DriverCosts(cores=cores, ended_s=ended_s, graded_s=graded_s) if cores else None
    return DecodeTimes(latency, drafted, context_s, prefill_s if prefill.any() else None, driver)


def _knots(batch: Floats) -> list[int]:
    """From the smallest to the largest."""
    if not batch.size:
        return []
    least, largest = int(batch.min()), int(batch.max())
    return [least, *(knot for knot in _KNOTS if least < knot < largest), *{largest} - {least}]


def _rising(batch: Floats, knots: Sequence[int]) -> Floats:
    """Column k rises from 0 at knot k - 1 to 1 at knot k and stays; column 0 is 1."""
    if not knots:
        return np.empty((batch.size, 0))
    columns = [np.ones(batch.size)]
    for low, high in pairwise(knots):
        columns.append(np.clip((batch - low) / (high - low), 0.0, 1.0))
    return np.column_stack(columns)


def fit_gradients(
    tasks: Sequence[tuple[GradientTask, float]],
) -> tuple[float, float, float, float]:
    """Seconds of a task, and of each response, token and squared token in it.

    Args:
        tasks: each with its seconds.
    """
    design = np.array(
        [
            [1.0, len(t.lengths), float(sum(t.lengths)), float(sum(n * n for n in t.lengths))]
            for t, _ in tasks
        ]
    )
    seconds = np.array([each for _, each in tasks])
    weights = 1.0 / np.sqrt(design[:, 2] + float(design[:, 2].mean()))
    task_s, launch_s, token_s, square_s = _fit(design, seconds, weights).tolist()
    return task_s, launch_s, token_s, square_s


def _fit(design: Floats, seconds: Floats, weights: Floats) -> Floats:
    """Non-negative least squares; columns are scaled, since their units differ widely."""
    scale = np.abs(design).max(axis=0)
    scale[scale == 0.0] = 1.0
    rows, wanted = design / scale * weights[:, None], seconds * weights
    size = np.full(design.shape[1], float(np.abs(wanted).max() / np.abs(rows).max()))

    def miss(free: Floats) -> Floats:
        return rows @ (free * size) - wanted

    many = design.shape[1]
    return least_squares(miss, np.ones(many), np.zeros(many), np.full(many, np.inf)) * size / scale


def _start_s(
    firsts: Sequence[tuple[First, float]],
    decoding: DecodeTimes,
    latency: dict[int, float],
    prefill_s: float,
) -> float:
    """Seconds from the start of a round to the first prefill."""

    def token_s(first: First) -> float:
        curve = decoding.ahead if first.ahead and decoding.ahead else latency
        plain = float(np.interp(first.batch, [*curve], [*curve.values()]))
        return plain + decoding.context_token_s * first.context

    waits = [spent - f.steps * token_s(f) - prefill_s * f.prefill for f, spent in firsts]
    return max(0.0, mean(waits))
