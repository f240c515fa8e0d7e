"""All that is wrong with a trace, line by line."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import polars as pl
from pydantic import BaseModel

from rollpacker.polytrace.formats import detect
from rollpacker.polytrace.formats.files.lines import Bad, Problem, Record, records, silent
from rollpacker.polytrace.formats.files.opened import Tick, quiet
from rollpacker.polytrace.formats.files.reading import Reading
from rollpacker.polytrace.formats.logs import reader
from rollpacker.polytrace.formats.logs.layouts import LAYOUTS
from rollpacker.polytrace.formats.ours import journal, native, runs
from rollpacker.polytrace.formats.suite import (
    dapo_filter,
    multiturn,
    packed_lengths,
    reward_timings,
)
from rollpacker.polytrace.schema import TraceError

__all__ = ["Problem", "problems"]

_MODELS: dict[str, type[BaseModel]] = {
    "packed_lengths": packed_lengths.PackedLengthsLine,
    "multiturn": multiturn.MultiturnLine,
    "reward_timings": reward_timings.RewardTimingsLine,
    "dapo_filter": dapo_filter.DapoFilterLine,
}
_READERS = {"run": runs.read, "journal": journal.read}
_STATES = ("kept", "filtered", "aborted")
_Lines = list[tuple[Path, int, Record]]


def problems(path: Path, *, format: str | None = None, tick: Tick = quiet) -> list[Problem]:
    """Everything that is wrong at ``path``, in the order of files and lines.

    Besides each line's fields it checks what files say of each other: response sums of
    ``reward_timings`` and prompt counts of ``dapo_filter`` against ``packed_lengths``. Where no
    line can be named, as in parquet files, ``line`` is 0. ``tick`` is told of bytes read.
    """
    found: list[Problem] = []
    try:
        given = detect.sources(path, format)
    except TraceError as error:
        return [Problem(path, 0, _without(str(error), path))]
    for source in given:
        lines = {
            kind: _lines(files, kind, found.append)
            for kind, files in source.files.items()
            if kind in _MODELS
        }
        found += source.left
        for kind, files in source.files.items():
            if kind in LAYOUTS:
                found += _of_log(files, kind, source.task, tick)
            elif kind not in _MODELS:
                found += _unreadable(files, kind, source.task)
        found += _disagreements(lines)
    return found


def _lines(files: list[Path], kind: str, bad: Bad) -> _Lines:
    found: _Lines = []
    for path in files:
        before = len(found)
        found += [(path, number, line) for number, line in records(path, _MODELS[kind], bad)]
        if len(found) == before and not path.read_bytes().strip():
            bad(Problem(path, 0, "empty"))
    return found


def _of_log(files: list[Path], kind: str, task: str, tick: Tick) -> list[Problem]:
    """By the reader itself, so that it takes what this lets through."""
    found: list[Problem] = []
    reading = Reading(task=task, note=silent, bad=found.append, left=found.append, tick=tick)
    trace = reader.read(files, reading, kind)
    if not trace.samples.height and not found:
        found.append(Problem(files[0], 0, "no responses in it"))
    return found


def _without(text: str, path: Path) -> str:
    return text.removeprefix(f"{path}: ").removeprefix(f"{path}, ")


def _unreadable(files: list[Path], kind: str, task: str) -> list[Problem]:
    found: list[Problem] = []
    for path in files:
        try:
            if kind == "native":
                found += [Problem(path, 0, text) for text in _wrong_rows(native.read(path).samples)]
            else:
                _READERS[kind]([path], Reading(task=task, note=silent))
        except TraceError as error:
            found.append(Problem(path, 0, _without(str(error), path)))
    return found


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


def _disagreements(lines: dict[str, _Lines]) -> list[Problem]:
    packed = lines.get("packed_lengths", [])
    if not packed:
        return []
    sums: Counter[tuple[int, int]] = Counter()
    prompts: Counter[int] = Counter()
    for _, _, line in packed:
        sums[line["step"], line["rank"]] += sum(line["output"])
        prompts[line["step"]] += 1
    found: list[Problem] = []
    for path, number, line in lines.get("reward_timings", []):
        told, real = line.get("response_sum"), sums.get((line["step"], line["rank"]))
        if told is not None and real is not None and told != real:
            found.append(
                Problem(path, number, f"response_sum: {told}, but the lengths add up to {real}")
            )
    for path, number, line in lines.get("dapo_filter", []):
        told, real = line["prompt_count"], prompts.get(line["workload_step"])
        if real is not None and told != real:
            text = f"prompt_count: {told}, but step {line['workload_step']} has {real} prompts"
            found.append(Problem(path, number, text))
    return found
