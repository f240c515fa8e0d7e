"""Writing a trace in PolyTrace's formats or in the native one."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl

from rollpacker.polytrace.formats.files.columns import unpack
from rollpacker.polytrace.formats.files.lines import Note, Record, silent
from rollpacker.polytrace.formats.ours import native
from rollpacker.polytrace.formats.suite import (
    dapo_filter,
    multiturn,
    packed_lengths,
    reward_timings,
)
from rollpacker.polytrace.schema import Trace, TraceError

WRITABLE = ("native", "polytrace", "packed_lengths", "multiturn", "reward_timings", "dapo_filter")
"""Formats that ``write`` knows; ``polytrace`` writes each file that the trace has rows for."""
_NO_PLACE = {
    "packed_lengths": ("turns", "tools", "reward", "reward_s", "start_s", "end_s"),
    "multiturn": ("dp_rank", "reward", "reward_s", "start_s", "end_s"),
}


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
    files: dict[str, list[Record]] = {}
    if format == "polytrace":
        turns = trace.samples["turns"].is_not_null()
        for kind, rows in (("packed_lengths", ~turns), ("multiturn", turns)):
            if rows.any():
                part = Trace(samples=trace.samples.filter(rows))
                files |= _responses(part, kind, note)
    elif format in _NO_PLACE:
        files |= _responses(trace, format, note)
    if format in ("polytrace", "reward_timings"):
        found = reward_timings.lines(trace).items()
        files |= {f"reward_timings_step_{step}.jsonl": lines for step, lines in found}
    if format in ("polytrace", "dapo_filter") and trace.filters.height:
        files["dapo_filter_indices.jsonl"] = dapo_filter.lines(trace)
    return files


def _responses(trace: Trace, kind: str, note: Note) -> dict[str, list[Record]]:
    _tell_losses(trace.samples, kind, note)
    turns = kind == "multiturn"
    name, form = ("multiturn_workload", multiturn) if turns else ("packed_lengths", packed_lengths)
    return {f"{name}_step_{step}.jsonl": lines for step, lines in form.lines(trace).items()}


def _tell_losses(frame: pl.DataFrame, kind: str, note: Note) -> None:
    lost = [name for name in _NO_PLACE[kind] if frame[name].is_not_null().any()]
    if lost:
        note(f"{kind} has no place for {', '.join(lost)}: left out")
    if aborted := frame.filter(pl.col("state") == "aborted").height:
        note(f"{kind} does not tell aborted responses: {aborted} are written as if complete")
    if frame["prompt_tokens"].is_null().any():
        note(f"{kind} needs prompt lengths: unknown ones are written as 0")
    foreign = frame.height and unpack(frame["extra"][0], kind) is None
    if foreign and frame["prompt"].n_unique() < frame.select("step", "prompt").n_unique():
        note(f"{kind} has no prompt ids: prompts of several steps become different ones")
