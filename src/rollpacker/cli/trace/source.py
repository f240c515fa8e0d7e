"""The trace, and the task in it, that a command line names."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from rollpacker.cli.output import errors

if TYPE_CHECKING:
    from rollpacker.polytrace.formats.files.reading import Count
    from rollpacker.polytrace.schema import Trace


def read(
    path: Path, format: str | None, task: str | None, notes: list[str], count: Count | None = None
) -> Trace:
    """A trace; ``notes`` gets what the reader says, a terminal how far it is."""
    from rollpacker.polytrace import formats

    with progress_of(path) as tick:
        return formats.read(
            path, format=format, task=task, note=notes.append, tick=tick, count=count
        )


@contextmanager
def progress_of(path: Path) -> Iterator[Callable[[int], None]]:
    """A bar of the bytes of ``path`` that were read, where standard error is a terminal."""
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
    path: Path, format: str | None, task: str | None, notes: list[str], count: Count | None = None
) -> Trace:
    """A trace with responses, of training where it has any; ``notes`` gets what the reader says."""
    from rollpacker.polytrace.schema import TraceError

    trace = read(path, format, task, notes, count)
    if not trace.samples.height:
        raise TraceError(f"{path}: no responses in it, only reward timings or filters")
    training = trace.of_training()
    if left := trace.samples.height - training.samples.height:
        notes.append(f"{path}: {left} responses of evaluations are left out")
    return training


def recognised(path: Path, format: str | None) -> list[str]:
    """What the files at ``path`` were read as, in words."""
    from rollpacker.polytrace.formats import detect

    return detect.titles(path, format)


def at_least(least: int, **options: int | None) -> None:
    """Raise ``ValueError`` when an option is given that is smaller."""
    for name, value in options.items():
        if value is not None and value < least:
            raise ValueError(f"--{name} {value}: must be at least {least}")


def chosen_task(path: Path, tasks: Collection[str], task: str | None) -> str:
    """The task to work on. Raises ``ValueError`` when it is not there, or not clear."""
    if task is None and len(tasks) == 1:
        return next(iter(tasks))
    if task is None:
        raise ValueError(f"{path}: several tasks; name one with --task: {', '.join(tasks)}")
    if task not in tasks:
        raise ValueError(f"{path}: no task {task!r}{meant(task, tasks)}; it has {', '.join(tasks)}")
    return task


def meant(given: str, known: Collection[str]) -> str:
    """What a misspelt name may have meant, as the middle of a sentence."""
    near = difflib.get_close_matches(given, known, n=1, cutoff=0.5)
    return f" (did you mean {near[0]!r}?)" if near else ""
