"""The trace, and the task in it, that a command line names."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollpacker.polytrace.schema import Trace


def read_responses(path: Path, format: str | None, task: str | None, notes: list[str]) -> Trace:
    """A trace with responses in it; ``notes`` gets what the reader says."""
    from rollpacker.polytrace import formats
    from rollpacker.polytrace.schema import TraceError

    trace = formats.read(path, format=format, task=task, note=notes.append)
    if not trace.samples.height:
        raise TraceError(f"{path}: no responses in it, only reward timings or filters")
    return trace


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
