"""Formats of workload traces: read any of them into a ``Trace``, write PolyTrace's and ours.

``detect`` says which format a path has, ``validate`` lists what is wrong with it; every other
module is one format.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import polars as pl

from rollpacker.polytrace.formats import detect
from rollpacker.polytrace.formats.detect import FORMATS
from rollpacker.polytrace.formats.export import WRITABLE, write
from rollpacker.polytrace.formats.files.lines import Note, silent
from rollpacker.polytrace.formats.files.opened import Tick, quiet
from rollpacker.polytrace.formats.files.reading import Count, Reading, Repeats
from rollpacker.polytrace.formats.logs import reader
from rollpacker.polytrace.formats.logs.layouts import LAYOUTS
from rollpacker.polytrace.formats.ours import journal, native, runs
from rollpacker.polytrace.formats.suite import (
    dapo_filter,
    multiturn,
    packed_lengths,
    reward_timings,
)
from rollpacker.polytrace.schema import Trace, TraceError

__all__ = ["FORMATS", "WRITABLE", "read", "write"]


def _read_native(files: Sequence[Path], reading: Reading) -> Trace:
    del reading
    return native.concat(native.read(path) for path in files)


_READERS: dict[str, Callable[[Sequence[Path], Reading], Trace]] = {
    "packed_lengths": packed_lengths.read,
    "multiturn": multiturn.read,
    "reward_timings": reward_timings.read,
    "dapo_filter": dapo_filter.read,
    "native": _read_native,
    "run": runs.read,
    "journal": journal.read,
    **{name: partial(reader.read, kind=name) for name in LAYOUTS},
}


def read(
    path: Path,
    *,
    format: str | None = None,
    task: str | None = None,
    note: Note = silent,
    tick: Tick = quiet,
    count: Count | None = None,
) -> Trace:
    """Read the trace at ``path``.

    Args:
        path: a file; a folder of files of one task; or a folder of such folders, which gives one
            task a folder.
        format: one of ``FORMATS``; found out by default.
        task: name of the task; default: the folder's. A native trace has its own names.
        note: told, in one line each, of approximations, of copies that were counted once and of
            what is left out.
        tick: told of bytes read.
        count: tokens of texts that a log does not count; default: an estimate by characters.

    Raises:
        TraceError: a line is wrong (file, line and field are named), nothing is there, or the
            format is unknown.
        OSError: a file cannot be read.
    """
    found = detect.sources(path, format)
    if task is not None and len(found) > 1:
        names = ", ".join(source.task for source in found)
        raise TraceError(f"{path}: one task name for {len(found)} tasks ({names})")
    repeats = Repeats()
    parts: list[Trace] = []
    for source in found:
        reading = Reading(
            task=task or source.task, note=note, repeats=repeats, tick=tick, count=count
        )
        for problem in source.left:
            reading.leave(problem)
        for line in source.notes:
            note(line)
        parts += [_READERS[kind](files, reading) for kind, files in source.files.items()]
    trace = native.concat(parts)
    if not trace.samples.height + trace.reward_batches.height + trace.filters.height:
        raise TraceError(f"{path}: no responses in it")
    if task is not None:
        if len(trace.tasks) > 1:
            tasks = ", ".join(trace.tasks)
            raise TraceError(f"one task name for {len(trace.tasks)} tasks ({tasks})")
        trace = Trace.of(table.with_columns(task=pl.lit(task)) for table in trace.tables)
    return dapo_filter.mark(trace, note)
