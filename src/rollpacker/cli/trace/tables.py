"""Reading and tables of ``rollpacker trace``."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from rollpacker.cli.output import errors, table_of

if TYPE_CHECKING:
    from rich.table import Table

    from rollpacker.polytrace.compare import Comparison
    from rollpacker.polytrace.describe import TaskReport
    from rollpacker.polytrace.formats.files import TokenCount
    from rollpacker.polytrace.model.fit import Goodness
    from rollpacker.polytrace.model.workload import WorkloadModel
    from rollpacker.polytrace.schema import Trace


def read(
    path: Path,
    format: str | None,
    task: str | None,
    notes: list[str],
    count: TokenCount | None = None,
) -> Trace:
    """Read a trace. ``notes`` gets the reader's notes, and a terminal shows progress."""
    from rollpacker.polytrace import formats

    with progress_of(path) as tick:
        return formats.read(
            path, format=format, task=task, note=notes.append, tick=tick, count=count
        )


@contextmanager
def progress_of(path: Path) -> Iterator[Callable[[int], None]]:
    """A progress bar of the bytes read from ``path``, if standard error is a terminal."""
    files = [path] if path.is_file() else (each for each in path.rglob("*") if each.is_file())
    with Progress(
        TextColumn("reading"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
        console=errors,
        transient=True,
        disable=not errors.is_terminal,
    ) as bar:
        total = sum(each.stat().st_size for each in files) if errors.is_terminal else None
        task = bar.add_task("reading", total=total)
        yield lambda size: bar.advance(task, size)


def read_responses(
    path: Path,
    format: str | None,
    task: str | None,
    notes: list[str],
    count: TokenCount | None = None,
) -> Trace:
    """A trace with responses, only those of training if it has any. ``notes`` gets notes."""
    from rollpacker.polytrace.schema import TraceError

    trace = read(path, format, task, notes, count)
    if not trace.samples.height:
        raise TraceError(f"{path}: no responses in it, only reward timings or filters")
    training = trace.of_training()
    if left := trace.samples.height - training.samples.height:
        notes.append(f"{path}: {left} responses of evaluations are left out")
    return training


def recognised(path: Path, format: str | None) -> list[str]:
    """The formats of the files at ``path``, as text."""
    from rollpacker.polytrace.formats import detect

    return detect.titles(path, format)


def at_least(least: int, **options: int | None) -> None:
    """Raise ``ValueError`` if a given option is smaller."""
    for name, value in options.items():
        if value is not None and value < least:
            raise ValueError(f"--{name} {value}: must be at least {least}")


def chosen_task(path: Path, tasks: Collection[str], task: str | None) -> str:
    """The task to use. Raises ``ValueError`` if it is unknown or ambiguous."""
    if task is None and len(tasks) == 1:
        return next(iter(tasks))
    if task is None:
        raise ValueError(f"{path}: several tasks: name one with --task: {', '.join(tasks)}")
    if task not in tasks:
        raise ValueError(f"{path}: no task {task!r}{meant(task, tasks)}; it has {', '.join(tasks)}")
    return task


def meant(given: str, known: Collection[str]) -> str:
    """A suggestion for a misspelt name, for the middle of a sentence."""
    near = difflib.get_close_matches(given, known, n=1, cutoff=0.5)
    return f" (did you mean {near[0]!r}?)" if near else ""


def tasks_of(trace: Trace) -> dict[str, dict[str, Any]]:
    """Counts, and mean and longest response, of each task."""
    import polars as pl

    tokens = pl.col("response_tokens")
    table = trace.samples.group_by("task", maintain_order=True).agg(
        pl.len().alias("responses"),
        pl.col("prompt").n_unique().alias("prompts"),
        pl.col("step").n_unique().alias("steps"),
        tokens.mean().alias("mean"),
        tokens.max().alias("max"),
    )
    return {row.pop("task"): row for row in table.iter_rows(named=True)}


def imported(tasks: Mapping[str, Mapping[str, Any]]) -> Table:
    """The table of ``tasks_of``."""
    view = _view("task", "responses", "prompts", "steps", "mean tokens", "max")
    for name, row in tasks.items():
        mean = "" if row["mean"] is None else f"{row['mean']:.0f}"
        longest = "" if row["max"] is None else str(row["max"])
        counts = (str(row["responses"]), str(row["prompts"]), str(row["steps"]))
        view.add_row(name, *counts, mean, longest)
    return view


def shipped(models: Mapping[str, WorkloadModel]) -> Table:
    """Models by name."""
    view = _view("name", "prompts", "responses", "cap")
    view.add_column("source")
    for name, model in models.items():
        cap = "" if model.lengths.cap is None else str(model.lengths.cap)
        view.add_row(name, str(model.prompts), str(model.responses), cap, model.source)
    return view


def compared(found: Comparison, title: str | None = None) -> Table:
    """Accuracy of the step and of each phase."""
    view = _view("seconds of", "mean accuracy", "worst")
    view.title = title
    view.add_row("step", f"{found.accuracy_mean:.1%}", f"{found.accuracy_worst:.1%}")
    for name, each in found.phases.items():
        view.add_row(name, f"{each.mean:.1%}", f"{each.worst:.1%}")
    return view


def _view(*columns: str) -> Table:
    view = table_of(*columns)
    view.columns[0].no_wrap = True
    return view


def described(reports: Mapping[str, TaskReport]) -> Table:
    """Tasks side by side."""
    rows = {
        "responses": "{:,}",
        "prompts": "{:,}",
        "steps": "{}",
        "mean": "{:,.0f}",
        "p50": "{:,.0f}",
        "p75": "{:,.0f}",
        "p99": "{:,.0f}",
        "max": "{:,.0f}",
        "cap_share": "{:.1%}",
        "icc": "{:.2f}",
        "icc_log": "{:.2f}",
        "tail_auc_first": "{:.2f}",
        "tail_auc_fourth": "{:.2f}",
        "tail_auc_history": "{:.2f}",
        "idle_fraction": "{:.1%}",
        "bubble_fraction": "{:.1%}",
        "reward_time_share": "{:.1%}",
        "tool_latency_share": "{:.1%}",
        "prefix_cache_share": "{:.1%}",
    }
    view = _view("", *reports)
    for name, form in rows.items():
        values = [getattr(report, name) for report in reports.values()]
        if any(value is not None for value in values):
            view.add_row(name, *("" if value is None else form.format(value) for value in values))
    return view


def goodness(found: Goodness) -> Table:
    """Errors of a generated sample."""
    view = _view("", "error")
    whole = "A large generated sample against the trace it was fitted to"
    view.title = f"{whole}. A trace of few responses varies more."
    view.add_row("distribution (Kolmogorov and Smirnov)", f"{found.ks:.4f}")
    view.add_row("mean", f"{found.mean_error:+.1%}")
    for name, error in found.quantile_error.items():
        view.add_row(name, f"{error:+.1%}")
    for name, value, error in (
        ("ICC", found.icc, found.icc_error),
        ("ICC of log length", found.icc_log, found.icc_log_error),
    ):
        if isfinite(value):
            view.add_row(f"{name}, {value:.3f} in the trace", f"{error:+.3f}")
    return view
