"""Plots of a workload trace as plain plotly figures. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import polars as pl
from numpy.typing import NDArray

from rollpacker.polytrace.describe import SynchronousRound
from rollpacker.report.drawing.figures import COLOURS, MAX_POINTS, Figure, line

Floats = NDArray[np.float64]

_BINS = 60
_FEW_STEPS = 20
_TOKENS = "response length (tokens)"


def lengths(tokens: Floats, quantiles: Mapping[str, float]) -> Figure:
    """Plot the distribution of lengths on a log axis, with lines at the named quantiles.
    ``tokens``: at least 1, shape (n,)."""
    data = [_histogram(tokens, "responses", COLOURS["kept"], whole=True)]
    names: dict[float, list[str]] = {}
    for name, value in quantiles.items():
        names.setdefault(value, []).append(name)
    middle = float(np.sqrt(tokens.min() * tokens.max()))
    top = max(data[0]["y"])
    for place, (value, called) in enumerate(names.items()):
        # Labels of near quantiles on different heights, so that both can be read.
        height = top * (1.24 - 0.11 * (place % 3))
        label = f" {', '.join(called)}: {value:,.0f} "
        side = "left" if value > middle else "right"
        data.append(_mark(value, height, label, f"middle {side}"))
    layout = {
        "height": 340,
        "showlegend": False,
        "xaxis": {"title": _TOKENS, "type": "log"},
        "yaxis": {"title": "share of responses", "tickformat": ".1%", "rangemode": "tozero"},
    }
    return {"data": data, "layout": layout}


def _mark(value: float, height: float, label: str, position: str) -> Figure:
    """A labelled upright line. It is a trace because shapes ignore a logarithmic axis."""
    return {
        "type": "scatter",
        "mode": "lines+text",
        "name": label.strip(),
        "x": [value, value],
        "y": [0.0, height],
        "text": ["", label],
        "textposition": position,
        "line": {"color": COLOURS["accuracy"], "width": 1, "dash": "dot"},
        "cliponaxis": False,
        "hoverinfo": "skip",
    }


def _histogram(values: Floats, name: str, colour: str, *, whole: bool) -> Figure:
    low, high = float(values.min()), float(values.max())
    edges = np.geomspace(low, max(high, 1.1 * low) * (1.0 + 1e-9), _BINS + 1)
    if whole:
        # A bin narrower than one token would be empty by chance.
        edges = np.unique(np.append(np.floor(edges), high + 1.0))
    share = np.histogram(values, edges)[0] / values.size
    stairs = {"line": {"color": colour, "width": 1.5, "shape": "hv"}, "fill": "tozeroy"}
    return line(edges.tolist(), [*share.tolist(), 0.0], name, colour, **stairs)


def within_and_between(lengths: Floats, groups: NDArray[np.int64]) -> Figure | None:
    """Plot each response against the others of its prompt. None if prompts have one response.
    ``lengths``: tokens, at least 1, shape (n,). ``groups``: visit of each, from 0, shape (n,)."""
    logs = np.log(lengths)
    sizes = np.bincount(groups)[groups]
    several = np.flatnonzero(sizes > 1)
    if several.size == 0:
        return None
    if several.size > MAX_POINTS:
        several = np.sort(np.random.default_rng(0).choice(several, MAX_POINTS, replace=False))
    totals = np.bincount(groups, logs)[groups]
    others = np.exp((totals - logs)[several] / (sizes[several] - 1))
    own = lengths[several]
    ends = [float(min(others.min(), own.min())), float(max(others.max(), own.max()))]
    points = {"mode": "markers", "marker": {"size": 4, "opacity": 0.45, "color": COLOURS["kept"]}}
    data = [
        line(others.tolist(), own.tolist(), "responses", COLOURS["kept"], **points),
        line(ends, ends, "as long as the others", COLOURS["other"]),
    ]
    layout = {
        "height": 420,
        "hovermode": "closest",
        "xaxis": {"title": "geometric mean of the prompt's other responses", "type": "log"},
        "yaxis": {"title": _TOKENS, "type": "log"},
    }
    return {"data": data, "layout": layout}


def over_steps(samples: pl.DataFrame) -> Figure:
    """Plot each step's length quantiles, on a log axis."""
    tokens = pl.col("response_tokens")
    table = (
        samples.group_by("step")
        .agg(
            tokens.median().alias("p50"),
            tokens.mean().alias("mean"),
            tokens.quantile(0.99, "linear").alias("p99"),
            tokens.max().alias("max"),
        )
        .sort("step")
    )
    steps = table["step"].to_list()
    names = {"p50": "kept", "mean": "train", "p99": "aborted", "max": "accuracy"}
    data = [
        line(steps, table[name].to_list(), name, COLOURS[colour], **_marks(len(steps)))
        for name, colour in names.items()
    ]
    return {"data": data, "layout": _steps(steps, {"title": "tokens", "type": "log"})}


def waiting(rounds: Mapping[int, SynchronousRound]) -> Figure:
    """Plot idle engines and empty decode slots of each step's synchronous round."""
    steps, every = list(rounds), list(rounds.values())
    shown = (
        ("engines idle", [each.idle for each in every], COLOURS["aborted"]),
        ("decode slots empty", [each.bubble for each in every], COLOURS["kept"]),
    )
    data = [
        line(steps, values, name, colour, **_marks(len(steps))) for name, values, colour in shown
    ]
    return {"data": data, "layout": _steps(steps, _share_axis("share of the round"))}


def share(name: str, by_step: Mapping[int, float]) -> Figure:
    """Plot a share of time by step."""
    steps, values = list(by_step), list(by_step.values())
    data = [line(steps, values, name, COLOURS["train"], **_marks(len(steps)))]
    return {"data": data, "layout": _steps(steps, _share_axis(f"share of {name}"))}


def seconds(values: Floats, name: str) -> Figure:
    """Plot the distribution of durations on a log axis. ``values``: seconds, above 0."""
    layout = {
        "height": 300,
        "showlegend": False,
        "xaxis": {"title": f"seconds of {name}", "type": "log"},
        "yaxis": {"title": "share", "tickformat": ".1%", "rangemode": "tozero"},
    }
    return {"data": [_histogram(values, name, COLOURS["train"], whole=False)], "layout": layout}


def _marks(count: int) -> Figure:
    return {"mode": "lines+markers"} if count <= 60 else {}


def _share_axis(title: str) -> Figure:
    return {"title": title, "tickformat": ".0%", "rangemode": "tozero"}


def _steps(steps: Sequence[int], yaxis: Figure) -> Figure:
    whole = {"dtick": 1} if max(steps) - min(steps) <= _FEW_STEPS else {}
    return {"height": 320, "xaxis": {"title": "step", **whole}, "yaxis": yaxis}


def by_step(samples: pl.DataFrame) -> Sequence[tuple[int, pl.DataFrame]]:
    """Return the rows of each step, in the order of steps."""
    parts = samples.sort("step", maintain_order=True).partition_by("step", maintain_order=True)
    return [(int(part["step"][0]), part) for part in parts]
