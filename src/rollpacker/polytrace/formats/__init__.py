"""Read workload traces of any format into a ``Trace``, and write PolyTrace's and ours.

``detect`` finds the format of a path. Every other module is one format or one family.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import polars as pl

from rollpacker.polytrace.formats import detect, suite
from rollpacker.polytrace.formats.detect import FORMATS
from rollpacker.polytrace.formats.files import (
    Note,
    Problem,
    Reading,
    Repeats,
    Tick,
    TokenCount,
    quiet,
    silent,
)
from rollpacker.polytrace.formats.logs import reader
from rollpacker.polytrace.formats.logs.layouts import LAYOUTS
from rollpacker.polytrace.formats.ours import journal, native, runs
from rollpacker.polytrace.formats.suite import SUITE, WRITABLE, write
from rollpacker.polytrace.schema import Trace, TraceError

__all__ = ["FORMATS", "WRITABLE", "problems", "read", "write"]


def _read_native(files: Sequence[Path], reading: Reading) -> Trace:
    del reading
    return native.concat(native.read(path) for path in files)


_READERS: dict[str, Callable[[Sequence[Path], Reading], Trace]] = {
    "native": _read_native,
    "run": runs.read,
    "journal": journal.read,
    **{name: partial(suite.read, kind=name) for name in SUITE},
    **{name: partial(reader.read, kind=name) for name in LAYOUTS},
}
_STATES = ("kept", "filtered", "aborted")


def read(
    path: Path,
    *,
    format: str | None = None,
    task: str | None = None,
    note: Note = silent,
    tick: Tick = quiet,
    count: TokenCount | None = None,
) -> Trace:
    """Read the trace at ``path``.

    Args:
        path: a file, a folder of one task's files, or a folder of such folders (one task each).
        format: one of ``FORMATS``. Detected by default.
        task: name of the task. Default: the folder's. A native trace has its own names.
        note: gets one line each about approximations, duplicates and omissions.
        tick: gets numbers of bytes read.
        count: counts tokens of texts if a log does not. Default: an estimate by characters.

    Raises ``OSError``, and ``TraceError`` if a line is wrong (file, line and field are named), the
    trace is empty, or the format is unknown.
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
    return suite.mark_filtered(trace, note)


def problems(path: Path, *, format: str | None = None, tick: Tick = quiet) -> list[Problem]:
    """Return all mistakes at ``path``, in the order of files and lines.

    Besides each line's fields it checks that files agree: response sums of ``reward_timings`` and
    prompt counts of ``dapo_filter`` with ``packed_lengths``. ``line`` is 0 if no line can be named,
    as in parquet files. ``tick`` gets numbers of bytes read.
    """
    found: list[Problem] = []
    try:
        given = detect.sources(path, format)
    except TraceError as error:
        return [_whole_file(path, error)]
    for source in given:
        reading = Reading(
            task=source.task, note=silent, bad=found.append, left=found.append, tick=tick
        )
        lines = {
            kind: list(suite.good_lines(files, kind, reading))
            for kind, files in source.files.items()
            if kind in SUITE
        }
        for kind in lines:
            empty = [each for each in source.files[kind] if not each.read_bytes().strip()]
            found += [Problem(each, 0, "empty") for each in empty]
        found += source.left
        for kind, files in source.files.items():
            if kind in LAYOUTS:
                before = len(found)
                if not reader.read(files, reading, kind).samples.height and len(found) == before:
                    found.append(Problem(files[0], 0, "no responses in it"))
            elif kind not in SUITE:
                found += _unreadable(files, kind, reading)
        found += _disagreements(lines)
    return found


def _whole_file(path: Path, error: TraceError) -> Problem:
    return Problem(path, 0, str(error).removeprefix(f"{path}: ").removeprefix(f"{path}, "))


def _unreadable(files: list[Path], kind: str, reading: Reading) -> Iterator[Problem]:
    for path in files:
        try:
            trace = _READERS[kind]([path], reading)
        except TraceError as error:
            yield _whole_file(path, error)
        else:
            wrong = _wrong_rows(trace.samples) if kind == "native" else []
            yield from (Problem(path, 0, text) for text in wrong)


def _wrong_rows(frame: pl.DataFrame) -> list[str]:
    rules = {
        "response_tokens": pl.col("response_tokens").is_null() | (pl.col("response_tokens") < 0),
        "prompt_tokens": pl.col("prompt_tokens") < 0,
        "step": pl.col("step").is_null() | (pl.col("step") < 0),
        "index": pl.col("index").is_null() | (pl.col("index") < 0),
        "task": pl.col("task").is_null(),
        "prompt": pl.col("prompt").is_null(),
        "state": pl.col("state").is_null() | ~pl.col("state").is_in(_STATES),
    }
    found: list[str] = []
    for name, rule in rules.items():
        rows = frame.select(rule.fill_null(False).arg_true()).to_series()
        if rows.len():
            row = int(rows[0])
            more = f" (and {rows.len() - 1} more rows)" if rows.len() > 1 else ""
            found.append(f"row {row + 1}: {name}: {frame[name][row]!r} is not allowed{more}")
    return found


def _disagreements(lines: dict[str, list[suite.LineAt]]) -> Iterator[Problem]:
    sums: Counter[tuple[int, int]] = Counter()
    prompts: Counter[int] = Counter()
    for _, _, line in lines.get("packed_lengths", []):
        sums[line["step"], line["rank"]] += sum(line["output"])
        prompts[line["step"]] += 1
    for path, number, line in lines.get("reward_timings", []):
        told, real = line.get("response_sum"), sums.get((line["step"], line["rank"]))
        if told is not None and real is not None and told != real:
            text = f"response_sum: {told}, but the lengths add up to {real}"
            yield Problem(path, number, text)
    for path, number, line in lines.get("dapo_filter", []):
        told, real = line["prompt_count"], prompts.get(line["workload_step"])
        if real is not None and told != real:
            text = f"prompt_count: {told}, but step {line['workload_step']} has {real} prompts"
            yield Problem(path, number, text)
