"""Plots as plain plotly figures (``data`` and ``layout`` dictionaries). Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from rollpacker.policy.lengths import (
    CENSORED,
    FINISHED,
    TRUNCATED,
    KaplanMeier,
    Observations,
)

# --- length curves --------------------------------------------------------------------------------

_ENDS = {"stop": FINISHED, "length": TRUNCATED, "abort": CENSORED}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LengthCurves:
    """Lengths of a run's kept responses, and the estimate without aborts."""

    kept: KaplanMeier
    true: KaplanMeier

    def ratio(self) -> float:
        return self.kept.mean() / max(self.true.mean(), 1e-9)


def length_facts(curves: LengthCurves | None) -> dict[str, Any]:
    """Return means in tokens, and shares that were cut off. The values are None without curves."""
    return {
        "kept_mean_tokens": curves and curves.kept.mean(),
        "true_mean_tokens": curves and curves.true.mean(),
        "kept_vs_true_len": curves and curves.ratio(),
        "kept_truncated": curves and curves.kept.truncated,
        "true_truncated": curves and curves.true.truncated,
    }


def length_curves(samples: pl.DataFrame, cap: int | None) -> LengthCurves | None:
    """Return the curves of all steps together, or None if nothing was kept.

    Aborted attempts count as right-censored, and carried ones as censored at their end.

    Args:
        samples: columns ``tokens, state, finish_reason, round_kind``.
        cap: longest response in tokens. None: the model's context limits it.
    """
    ended = samples.filter(
        ~pl.col("state").is_in(["failed", "carried"]) & pl.col("finish_reason").is_in(list(_ENDS))
    )
    long = pl.col("round_kind") == "long"
    kept = _observed(ended.filter(pl.col("state") == "kept"))
    if not len(kept):
        return None
    fresh, rerun = _observed(ended.filter(~long)), _observed(ended.filter(long))
    return LengthCurves(
        kept=KaplanMeier.fit(kept, Observations.of([]), cap),
        true=KaplanMeier.fit(fresh, rerun, cap),
    )


def _observed(samples: pl.DataFrame) -> Observations:
    ends = [_ENDS[reason] for reason in samples["finish_reason"]]
    return Observations.of(samples["tokens"].to_numpy().astype(np.int64), ends)


# --- figures --------------------------------------------------------------------------------------

Figure = dict[str, Any]
Metrics = Sequence[Mapping[str, Any]]

MAX_POINTS = 2_000
COLOURS = {
    "reward": "#3f7fbf",
    "accuracy": "#c8553d",
    "rollout": "#3f7fbf",
    "train": "#4b9b72",
    "other": "#9aa0a6",
    "kept": "#3f7fbf",
    "true": "#c8553d",
    "aborted": "#d9822b",
    "finished": "#b5651d",
    "dropped": "#9aa0a6",
    "failed": "#b03a5b",
}
MODES = ("#7d858d", "#3f7fbf", "#c8553d", "#4b9b72", "#8663a8")
"""Colours of compared runs, in order. The first is the baseline."""


def number(line: Mapping[str, Any], name: str) -> float | None:
    """Return a metric of one step. None if it was not measured or is not finite."""
    value = line.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def column(metrics: Metrics, name: str) -> list[float | None]:
    """Return one metric of every step."""
    return [number(line, name) for line in metrics]


def present(metrics: Metrics, name: str) -> list[float]:
    """Return one metric of the steps that measured it."""
    return [value for value in column(metrics, name) if value is not None]


def smooth(values: Sequence[float | None], window: int) -> list[float | None]:
    """Return a centred moving mean over ``window`` steps. Unknown values are skipped."""
    known = pl.Series(values, dtype=pl.Float64)
    return known.rolling_mean(window, min_samples=1, center=True).to_list()


def thin(count: int) -> list[int]:
    """Return indices of about ``MAX_POINTS`` of ``count`` points. The last is always included."""
    every = max(1, -(-count // MAX_POINTS))
    kept = list(range(0, count, every))
    return kept if not kept or kept[-1] == count - 1 else [*kept, count - 1]


def line(x: Sequence[Any], y: Sequence[Any], name: str, colour: str, **more: Any) -> Figure:
    """Return a line trace. ``more`` overrides or adds plotly properties."""
    rows = thin(len(x))
    trace = {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": [_round(x[i]) for i in rows],
        "y": [_round(y[i]) for i in rows],
        "line": {"color": colour, "width": 2},
    }
    return trace | more


def _round(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _steps(metrics: Metrics) -> list[int]:
    return [line["step"] for line in metrics]


def accuracies(metrics: Metrics, summary: Mapping[str, Any]) -> list[tuple[int, float]]:
    """Return sampled accuracy on held-out problems by the number of steps before it, from 0 on."""
    name, steps = "eval/sampled_accuracy", _steps(metrics)
    points = [
        (steps[0], number(summary.get("before") or {}, name)),
        *((line["step"] + 1, number(line, name)) for line in metrics),
        (steps[-1] + 1, number(summary.get("after") or {}, name)),
    ]
    return list({step: value for step, value in points if value is not None}.items())


def learning(metrics: Metrics, accuracy: Sequence[tuple[int, float]]) -> Figure:
    """Plot reward by step and, if evaluated, accuracy on held-out problems."""
    steps, reward, colour = _steps(metrics), column(metrics, "reward"), COLOURS["reward"]
    window = max(3, len(steps) // 15) | 1
    data = [
        line(steps, reward, "reward", colour, opacity=0.4, line={"color": colour, "width": 1}),
        line(steps, smooth(reward, window), f"reward, mean of {window} steps", colour),
    ]
    layout: Figure = {"xaxis": {"title": "step"}, "yaxis": {"title": "reward"}, "height": 300}
    if accuracy:
        mark = {"mode": "lines+markers", "marker": {"size": 7}, "yaxis": "y2"}
        after, values = [step for step, _ in accuracy], [value for _, value in accuracy]
        data.append(line(after, values, "sampled accuracy", COLOURS["accuracy"], **mark))
        layout["yaxis"]["domain"], layout["height"] = [0.0, 0.46], 440
        layout["yaxis2"] = {
            "title": "held-out accuracy",
            "domain": [0.56, 1.0],
            "tickformat": ".0%",
        }
    return {"data": data, "layout": layout}


def time_split(metrics: Metrics) -> Figure:
    """Plot seconds of each step: rollout, training after it, and the rest."""
    steps = _steps(metrics)
    rollout = [value or 0.0 for value in column(metrics, "timing_s/rollout")]
    train = [value or 0.0 for value in column(metrics, "timing_s/train")]
    whole = [value or 0.0 for value in column(metrics, "step_time")]
    other = [max(0.0, w - r - t) for w, r, t in zip(whole, rollout, train, strict=True)]
    data = [
        bars(steps, values, name, COLOURS[name])
        for name, values in (("rollout", rollout), ("train", train), ("other", other))
    ]
    return {"data": data, "layout": _stacked("seconds")}


def bars(x: Sequence[int], y: Sequence[float], name: str, colour: str) -> Figure:
    """Return a bar trace. Neighbours are averaged if there are too many."""
    size = max(1, -(-len(x) // (MAX_POINTS // 4)))
    starts = range(0, len(x), size)
    means = [float(np.mean(y[i : i + size])) for i in starts]
    return {
        "type": "bar",
        "name": name,
        "x": [x[i] for i in starts],
        "y": [_round(value) for value in means],
        "marker": {"color": colour, "line": {"width": 0}},
    }


def _stacked(unit: str) -> Figure:
    return {
        "barmode": "stack",
        "bargap": 0.15,
        "height": 300,
        "xaxis": {"title": "step"},
        "yaxis": {"title": unit},
    }


def lengths(curves: LengthCurves) -> Figure:
    """Plot survival curves of lengths: of kept responses, and estimated without aborts."""
    data = [
        _survival(curves.true, "all responses (estimated)", COLOURS["true"], "dot"),
        _survival(curves.kept, "kept responses", COLOURS["kept"], "solid"),
    ]
    layout = {
        "height": 320,
        "xaxis": {"title": "response length (tokens)", "rangemode": "tozero"},
        "yaxis": {"title": "share longer", "tickformat": ".0%", "range": [0, 1.02]},
    }
    return {"data": data, "layout": layout}


def _survival(curve: KaplanMeier, name: str, colour: str, dash: str) -> Figure:
    shape = {"line": {"color": colour, "width": 2, "dash": dash}}
    share = curve.survival.tolist()
    return line(list(range(len(share))), share, name, colour, **shape)


LOST = {
    "aborted": "aborted while decoding",
    "finished": "finished too late",
    "dropped": "group dropped",
    "failed": "failed",
}


def lost_tokens(samples: pl.DataFrame) -> pl.DataFrame:
    """Return generated tokens that no update used: columns ``step`` and the keys of ``LOST``."""
    late = (pl.col("state") == "aborted") & (pl.col("finish_reason") != "abort")
    why = pl.when(late).then(pl.lit("finished")).otherwise(pl.col("state")).alias("why")
    tokens = samples.select("step", "tokens", why)
    sums = [pl.col("tokens").filter(pl.col("why") == name).sum().alias(name) for name in LOST]
    return tokens.group_by("step").agg(sums).sort("step")


def aborted(lost: pl.DataFrame) -> Figure:
    """Plot the tokens that were generated and thrown away, by step and reason."""
    steps = lost["step"].to_list()
    data = [
        bars(steps, lost[name].to_list(), label, COLOURS[name])
        for name, label in LOST.items()
        if lost[name].sum() > 0
    ]
    return {"data": data, "layout": _stacked("tokens")}
