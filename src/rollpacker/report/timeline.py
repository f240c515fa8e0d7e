"""Write ``timeline.json``: a run as a Chrome trace, which opens in ui.perfetto.dev.

The format is Chromium's Trace Event Format, with times in microseconds. Processes are the steps,
the workers (or separate engines and replicas) and the rewards. Threads are decode slots and
gradient lanes, so a thread's events nest or follow each other.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl

from rollpacker.report.reading import bubbles
from rollpacker.report.reading.run_folder import RunFolder, load_run

Event = dict[str, Any]

MAX_ATTEMPTS = 100_000  # attempts in a timeline. With more the viewer gets slow.

_STEPS, _REWARDS, _WORKERS = 1, 2, 10  # process ids: the steps, the rewards, and the first worker
_SLOT, _TASK = 100, 1
"""Thread ids: the first decode slot, and the first gradient lane, which sorts above it."""


def write_timeline(run: Path, max_attempts: int = MAX_ATTEMPTS) -> Path:
    """Write ``RUN/timeline.json`` and return its path. A run of more than ``max_attempts`` shows
    its last steps only. Raises ``ReportError`` (a ``ValueError``) with one line on a missing or
    damaged file."""
    path = run / "timeline.json"
    partial = path.with_name(path.name + ".part")
    loaded = _recent(load_run(run), max_attempts)
    with partial.open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        for i, event in enumerate(trace_events(loaded)):
            file.write((",\n" if i else "") + json.dumps(event, separators=(",", ":")))
        file.write("\n]}\n")
    partial.replace(path)
    return path


def trace_events(run: RunFolder) -> Iterator[Event]:
    """Yield all events of a run, metadata first within each process."""
    stays = bubbles.segments(run.samples, run.moves, run.formed)
    yield from _steps(run)
    workers = sorted(set(stays["worker"]) | set(run.tasks["worker"]))
    for worker in workers:
        yield from _process(_WORKERS + worker, run.place(worker).name)
        yield from _responses(_WORKERS + worker, stays.filter(pl.col("worker") == worker), run)
        yield from _tasks(_WORKERS + worker, run.tasks.filter(pl.col("worker") == worker))
    yield from _grading(run)


def _recent(run: RunFolder, limit: int) -> RunFolder:
    if len(run.samples) <= limit:
        return run
    counts = run.samples.group_by("step").len().sort("step", descending=True)
    fits = counts.filter(pl.col("len").cum_sum() <= limit)["step"]
    first = fits.min() if len(fits) else counts["step"][0]
    return replace(
        run,
        metrics=[line for line in run.metrics if line["step"] >= first],
        **{
            name: getattr(run, name).filter(pl.col("step") >= first)
            for name in ("samples", "tasks", "moves", "formed", "rounds", "waits")
        },
    )


def _us(seconds: float) -> int:
    return round(seconds * 1e6)


def _process(pid: int, name: str) -> Iterator[Event]:
    yield from _named("process", pid, 0, name, pid)


def _threads(pid: int, first: int, names: Iterable[str]) -> Iterator[Event]:
    for tid, name in enumerate(names, first):
        yield from _named("thread", pid, tid, name, tid)


def _named(what: str, pid: int, tid: int, name: str, order: int) -> Iterator[Event]:
    for key, args in (("name", {"name": name}), ("sort_index", {"sort_index": order})):
        yield {"ph": "M", "name": f"{what}_{key}", "pid": pid, "tid": tid, "args": args}


def _complete(
    pid: int, tid: int, name: str, category: str, start: float, end: float, args: Event
) -> Event:
    begin = _us(start)
    place = {"ph": "X", "pid": pid, "tid": tid, "name": name, "cat": category}
    return place | {"ts": begin, "dur": max(0, _us(end) - begin), "args": args}


def _steps(run: RunFolder) -> Iterator[Event]:
    yield from _process(_STEPS, "steps")
    yield from _threads(_STEPS, 1, ["step"])
    kinds = dict(run.samples.select("step", "round_kind").unique("step").iter_rows())
    metrics = {line["step"]: line for line in run.metrics}
    windows = bubbles.step_windows(run.samples, run.tasks, run.rounds, run.metrics)
    for step, (start, rollout_end, end) in windows.items():
        line = metrics.get(step, {})
        args = {name: line[name] for name in ("reward", "step_time") if name in line}
        name = f"step {step} ({kinds[step]})"
        yield _complete(_STEPS, 1, name, "step", start, end, args)
        yield _complete(_STEPS, 1, "rollout", "phase", start, rollout_end, {})
        if end > rollout_end:
            yield _complete(_STEPS, 1, "train", "phase", rollout_end, end, {})


def _responses(pid: int, stays: pl.DataFrame, run: RunFolder) -> Iterator[Event]:
    columns = ("prompt", "sample_index", "tokens", "reward", "state", "finish_reason", "step")
    about = run.samples.select("attempt", *columns)
    slots = bubbles.lanes(bubbles.spans(stays))
    held = stays.with_columns(slot=pl.Series(slots, dtype=pl.Int64))
    decoding, waiting = bubbles.split(held, run.waits)
    yield from _threads(pid, _SLOT, (f"slot {n}" for n in range(max(slots, default=-1) + 1)))
    rows = held.select("slot", "attempt", "start_s", "end_s").join(
        about, on="attempt", how="left", maintain_order="left"
    )
    for slot, attempt, start, end, *values in rows.iter_rows():
        args = {"attempt": attempt} | dict(zip(columns, values, strict=True))
        name = f"{args['prompt']} #{args['sample_index']}"
        yield _complete(pid, _SLOT + slot, name, args["state"], start, end, args)
    for slot, attempt, start, end in waiting.select(rows.columns[:4]).iter_rows():
        args = {"attempt": attempt}
        yield _complete(pid, _SLOT + slot, "environment", "environment", start, end, args)
    yield from _counted(pid, "running attempts", "running", bubbles.spans(decoding))
    if not run.waits.is_empty():
        yield from _counted(
            pid, "attempts at their environments", "waiting", bubbles.spans(waiting)
        )


def _counted(
    pid: int, name: str, series: str, spans: Sequence[tuple[float, float]]
) -> Iterator[Event]:
    changes: Counter[int] = Counter()
    for start, end in spans:
        changes[_us(start)] += 1
        changes[_us(end)] -= 1
    place = {"ph": "C", "name": name, "pid": pid, "tid": 0}
    now = 0
    for at in sorted(changes):
        now += changes[at]
        yield place | {"ts": at, "args": {series: now}}


def _tasks(pid: int, tasks: pl.DataFrame) -> Iterator[Event]:
    lanes = bubbles.lanes(bubbles.spans(tasks))
    more = (f"gradients {n}" for n in range(1, max(lanes, default=0) + 1))
    yield from _threads(pid, _TASK, ["gradients", *more] if lanes else [])
    rows = tasks.select("start_s", "end_s", "kind", "step", "prompts").iter_rows()
    for lane, (start, end, kind, step, prompts) in zip(lanes, rows, strict=True):
        args = {"step": step, "prompts": prompts}
        yield _complete(pid, _TASK + lane, kind, "gradient", start, end, args)


def _grading(run: RunFolder) -> Iterator[Event]:
    yield from _process(_REWARDS, "rewards")
    graded = run.samples.filter(pl.col("grade_s").is_not_null())
    rows = graded.select(
        *("attempt", "prompt", "sample_index", "reward"),
        start_s="end_s",
        end_s=pl.col("end_s") + pl.col("grade_s"),
    ).sort("start_s")
    lanes = bubbles.lanes(bubbles.spans(rows))
    yield from _threads(_REWARDS, 1, (f"grading {n}" for n in range(max(lanes, default=-1) + 1)))
    for lane, (attempt, prompt, index, reward, start, end) in zip(
        lanes, rows.iter_rows(), strict=True
    ):
        args = {"attempt": attempt, "reward": reward}
        yield _complete(_REWARDS, 1 + lane, f"{prompt} #{index}", "grading", start, end, args)
