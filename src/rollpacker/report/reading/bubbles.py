"""Busy and idle time of workers, from attempts and gradient tasks. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from rollpacker.runtime.step import bubble
from rollpacker.runtime.step.bubble import Span, idle_s

Intervals = NDArray[np.float64]  # shape (N, 2): start and end in seconds

SEGMENT_COLUMNS = {
    "step": pl.Int64,
    "attempt": pl.Int64,
    "worker": pl.Int64,
    "start_s": pl.Float64,
    "end_s": pl.Float64,
}


def union(intervals: Iterable[Span]) -> Intervals:
    """Merge intervals into sorted, disjoint ones. Empty ones are dropped."""
    whole = bubble.union((start, end) for start, end in intervals if end > start)
    return np.asarray(whole, np.float64).reshape(-1, 2)


def spans(frame: pl.DataFrame) -> list[Span]:
    """Return columns ``start_s`` and ``end_s`` of each row."""
    return list(zip(frame["start_s"], frame["end_s"], strict=True))


def gaps(busy: Intervals, start: float, end: float) -> Intervals:
    """Return the parts of ``[start, end]`` outside ``busy`` (sorted, disjoint)."""
    inside = np.clip(busy, start, end)
    edges = np.r_[start, inside.ravel(), end].reshape(-1, 2)
    return edges[edges[:, 1] > edges[:, 0]]


def total(intervals: Intervals) -> float:
    """Return the summed length in seconds."""
    return float((intervals[:, 1] - intervals[:, 0]).sum())


def lanes(intervals: Sequence[tuple[float, float]]) -> list[int]:
    """Return the lowest free lane for each interval, so that none overlap within a lane.

    Intervals that start together take lanes from the longest down, which draws a round as a
    staircase. There are at most as many lanes as intervals overlap at one time.
    """
    order = sorted(range(len(intervals)), key=lambda i: (intervals[i][0], -intervals[i][1]))
    busy: list[tuple[float, int]] = []
    free: list[int] = []
    lane_of = [0] * len(intervals)
    for i in order:
        start, end = intervals[i]
        while busy and busy[0][0] <= start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        lane = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (end, lane))
        lane_of[i] = lane
    return lane_of


def segments(
    samples: pl.DataFrame, moves: pl.DataFrame, formed: pl.DataFrame | None = None
) -> pl.DataFrame:
    """Return one row per stay of an attempt on a worker.

    Args:
        samples: columns ``step, attempt, worker, start_s, end_s``.
        moves: columns ``attempt, worker, t``: start and migrations, in the order of time. Attempts
            without moves ran on the worker in ``samples``.
        formed: columns ``step, lead, worker, t``: from ``t`` on, ``worker`` decodes with ``lead``.
    """
    stays = samples.select(SEGMENT_COLUMNS.keys())
    route: dict[int, list[tuple[float, int]]] = {}
    for attempt, worker, t in moves.select("attempt", "worker", "t").iter_rows():
        route.setdefault(attempt, []).append((t, worker))
    still = stays.filter(~pl.col("attempt").is_in(list(route)))
    rows = [
        (step, attempt, worker, start, end)
        for step, attempt, _, s, e in stays.filter(pl.col("attempt").is_in(list(route))).iter_rows()
        for worker, start, end in _cut(route[attempt], s, e)
    ]
    split = pl.DataFrame(rows, schema=SEGMENT_COLUMNS, orient="row")
    stays = pl.concat([still, split])
    if formed is not None:
        stays = pl.concat([stays, _together(stays, formed)])
    return stays.sort("step", "worker", "start_s", "attempt")


def _together(stays: pl.DataFrame, formed: pl.DataFrame) -> pl.DataFrame:
    """Copies of the leads' stays on their workers, once even if they were joined twice."""
    found = stays.rename({"worker": "lead"}).join(formed, on=["step", "lead"])
    start = pl.max_horizontal("start_s", "t").alias("start_s")
    found = found.filter(pl.col("end_s") > pl.col("t")).with_columns(start)
    first = found.sort("start_s").unique(["attempt", "worker", "end_s"], keep="first")
    return first.select(SEGMENT_COLUMNS.keys())


def _cut(
    route: Sequence[tuple[float, int]], start: float, end: float
) -> list[tuple[int, float, float]]:
    times = [start, *(min(max(t, start), end) for t, _ in route[1:]), end]
    stays = [(w, times[i], times[i + 1]) for i, (_, w) in enumerate(route)]
    return [stay for stay in stays if stay[2] > stay[1]] or [(route[-1][1], start, end)]


def split(stays: pl.DataFrame, waits: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Split stays into the parts in which attempts decode, and those in which they wait.

    Args:
        stays: of ``segments``. More columns are kept.
        waits: columns ``step, attempt, start_s, end_s``, in the order of time and disjoint for each
            attempt. Without an end, a wait lasts to the attempt's end.
    """
    if waits.is_empty():
        return stays, stays.clear()
    names, rows = stays.columns, stays.with_row_index("stay")
    found = rows.join(waits, on=["step", "attempt"], suffix="_w", maintain_order="left_right")
    waiting = found.with_columns(
        start_s=pl.max_horizontal("start_s", "start_s_w"),
        end_s=pl.min_horizontal("end_s", "end_s_w"),
    ).filter(pl.col("end_s") > pl.col("start_s"))
    of_stay = waiting.group_by("stay", maintain_order=True).agg(begun="start_s", over="end_s")
    cut = rows.join(of_stay, on="stay", how="left", maintain_order="left")
    none = pl.lit([], pl.List(pl.Float64))
    decoding = (
        cut.with_columns(
            start_s=pl.concat_list("start_s", pl.col("over").fill_null(none)),
            end_s=pl.concat_list(pl.col("begun").fill_null(none), "end_s"),
        )
        .explode("start_s", "end_s")
        .filter((pl.col("end_s") > pl.col("start_s")) | pl.col("begun").is_null())
    )
    return decoding.select(names), waiting.select(names)


def step_windows(
    samples: pl.DataFrame,
    tasks: pl.DataFrame,
    rounds: pl.DataFrame,
    metrics: Sequence[Mapping[str, Any]] = (),
) -> dict[int, tuple[float, float, float]]:
    """Return ``{step: (start, end of the rollout, end)}`` in seconds, of the steps with samples.

    The run's own measurements come first. An unfinished step's rollout ends with the last decided
    response (journal) or else the last attempt, the step with its last attempt or task.
    """
    spans = samples.group_by("step").agg(pl.min("start_s"), pl.max("end_s").alias("rollout_end_s"))
    ends = tasks.group_by("step").agg(pl.max("end_s").alias("tasks_end_s"))
    joined = spans.join(rounds, on="step", how="left", suffix="_j").join(ends, "step", "left")
    table = joined.select(
        "step",
        pl.min_horizontal("start_s", "start_s_j").alias("start"),
        pl.max_horizontal("rollout_end_s", "rollout_end_s_j").alias("rollout_end"),
        pl.max_horizontal("rollout_end_s", "rollout_end_s_j", "tasks_end_s").alias("end"),
    ).sort("step")
    windows = {step: (start, rollout, end) for step, start, rollout, end in table.iter_rows()}
    measured = {line["step"]: _measured(line) for line in metrics if "start_s" in line}
    return windows | {step: window for step, window in measured.items() if step in windows}


def _measured(line: Mapping[str, Any]) -> tuple[float, float, float]:
    start = line["start_s"]
    return start, start + line["timing_s/rollout"], start + line["step_time"]


def worker_bubbles(
    stays: pl.DataFrame,
    tasks: pl.DataFrame,
    windows: dict[int, tuple[float, float, float]],
    devices: Callable[[int], int] = lambda _worker: 1,
    waiting: pl.DataFrame | None = None,
) -> pl.DataFrame:
    """Return busy and idle seconds of every worker in each step that it took part in.

    A worker is busy while it decodes an attempt or runs a gradient task. It is idle by tools while
    all attempts that it holds wait for their environments.

    Args:
        stays: in which attempts decode: of ``segments``, or the first of ``split``.
        tasks: columns ``step, worker, start_s, end_s``.
        devices: of a worker. Its seconds count for each of them.
        waiting: the second of ``split``. None: there are no environments.

    Columns ``step, worker, rollout_s, rollout_idle_s, rollout_tools_s`` (part of the idle time),
    ``step_s, step_idle_s, decode_s, gradient_s``. ``rollout_s`` and ``step_s`` are the windows'
    lengths.
    """
    decoding, training = _by_worker(stays), _by_worker(tasks)
    holding = {} if waiting is None else _by_worker(waiting)
    rows: list[tuple[float, ...]] = []
    for step, worker in sorted({*decoding, *training, *holding}):
        if step not in windows:
            continue
        start, rollout_end, end = windows[step]
        decode, train = decoding.get((step, worker), []), training.get((step, worker), [])
        busy = [*decode, *train]
        idle = idle_s(busy, start, rollout_end)
        tools = idle - idle_s([*busy, *holding.get((step, worker), [])], start, rollout_end)
        in_step = (end - start, idle_s(busy, start, end))
        times = (rollout_end - start, idle, tools, *in_step, _covered(decode), _covered(train))
        rows.append((step, worker, *(devices(worker) * seconds for seconds in times)))
    names = ["rollout_s", "rollout_idle_s", "rollout_tools_s", "step_s", "step_idle_s", "decode_s"]
    names += ["gradient_s"]
    schema = {"step": pl.Int64, "worker": pl.Int64} | dict.fromkeys(names, pl.Float64)
    return pl.DataFrame(rows, schema=schema, orient="row")


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    return total(union(spans))


def bubble_fractions(bubbles: pl.DataFrame) -> pl.DataFrame:
    """Return idle shares by step, each 0 to 1: columns ``step, rollout_fraction, step_fraction,
    tools_fraction`` (idle by tools, of the rollout)."""
    sums = bubbles.group_by("step").agg(pl.exclude("worker").sum()).sort("step")
    return sums.select(
        "step",
        (pl.col("rollout_idle_s") / pl.col("rollout_s")).fill_nan(0.0).alias("rollout_fraction"),
        (pl.col("step_idle_s") / pl.col("step_s")).fill_nan(0.0).alias("step_fraction"),
        (pl.col("rollout_tools_s") / pl.col("rollout_s")).fill_nan(0.0).alias("tools_fraction"),
    )


def _by_worker(frame: pl.DataFrame) -> dict[tuple[int, int], list[tuple[float, float]]]:
    found: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for step, worker, start, end in frame.select("step", "worker", "start_s", "end_s").iter_rows():
        found.setdefault((step, worker), []).append((start, end))
    return found
