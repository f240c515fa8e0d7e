"""Writing a trace in PolyTrace's formats or in the native one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import polars as pl

from rollpacker.polytrace.formats.files.columns import unpack
from rollpacker.polytrace.formats.files.lines import Note, Record, silent
from rollpacker.polytrace.formats.ours import native
from rollpacker.polytrace.formats.suite import SUITE
from rollpacker.polytrace.schema import Trace, TraceError

WRITABLE = ("native", "polytrace", *SUITE)
"""Formats that ``write`` knows; ``polytrace`` writes each file that the trace has rows for."""


def write(trace: Trace, path: Path, format: str, *, note: Note = silent) -> list[Path]:
    """Write ``trace`` and return the files.

    Args:
        trace: what to write.
        path: the file of a native trace; otherwise a folder, made when missing, which gets one
            file a step (``packed_lengths_step_N.jsonl``), in a folder a task if there are several.
        format: one of ``WRITABLE``.
        note: told, in one line each, what the format has no place for.

    Raises:
        TraceError: unknown format, or nothing to write in it.
        OSError: a file cannot be written.
    """
    if format not in WRITABLE:
        raise TraceError(f"cannot write {format!r}; formats: {', '.join(WRITABLE)}")
    if format == "native":
        if path.suffix != ".parquet":
            raise TraceError(f"{path}: a native trace is a file *.parquet")
        path.parent.mkdir(parents=True, exist_ok=True)
        native.write(trace, path)
        return [path]
    if path.is_file():
        raise TraceError(f"{path}: expected a folder for the files of {format}")
    tasks = pl.concat([table["task"] for table in trace.tables])
    names: list[str] = tasks.unique(maintain_order=True).to_list()
    written: list[Path] = []
    for name in names:
        folder = path / _safe(name) if len(names) > 1 else path
        files = _files(trace.only(name), format, note)
        if files:
            folder.mkdir(parents=True, exist_ok=True)
        for file, found in files.items():
            text = "".join(json.dumps(record) + "\n" for record in found)
            (folder / file).write_text(text, encoding="utf-8")
            written.append(folder / file)
    if not written:
        raise TraceError(f"{path}: the trace has nothing to write as {format}")
    return written


def _safe(name: str) -> Path:
    """A task's folder; a task may be named by a path, never by one that leads out."""
    parts = [part for part in name.split("/") if part not in ("", ".", "..")]
    return Path(*parts) if parts else Path("task")


def _files(trace: Trace, format: str, note: Note) -> dict[str, list[Record]]:
    if format != "polytrace":
        return _lines(trace, format, note)
    turns = trace.samples["turns"].is_not_null()
    files: dict[str, list[Record]] = {}
    for kind, rows in (("packed_lengths", ~turns), ("multiturn", turns)):
        files |= _lines(Trace(samples=trace.samples.filter(rows)), kind, note)
    return files | _lines(trace, "reward_timings", note) | _lines(trace, "dapo_filter", note)


def _lines(trace: Trace, kind: str, note: Note) -> dict[str, list[Record]]:
    frame, form = trace.samples, SUITE[kind]
    if form.no_place and frame.height:
        for line in _losses(frame, kind):
            note(f"{kind} {line}")
    return form.lines(trace)


def _losses(frame: pl.DataFrame, kind: str) -> Iterator[str]:
    """What a format of responses cannot say of them."""
    lost = [name for name in SUITE[kind].no_place if frame[name].is_not_null().any()]
    if lost:
        yield f"has no place for {', '.join(lost)}: left out"
    if aborted := frame.filter(pl.col("state") == "aborted").height:
        yield f"does not tell aborted responses: {aborted} are written as if complete"
    if frame["prompt_tokens"].is_null().any():
        yield "needs prompt lengths: unknown ones are written as 0"
    foreign = unpack(frame["extra"][0], kind) is None
    if foreign and frame["prompt"].n_unique() < frame.select("step", "prompt").n_unique():
        yield "has no prompt ids: prompts of several steps become different ones"
