"""Which format a file or a folder has: from what is in it, and from its name where that is torn."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import polars as pl
from polars.exceptions import PolarsError

from rollpacker.core.sample_columns import files as table_files
from rollpacker.polytrace.formats import native, runs, trl
from rollpacker.polytrace.schema import TraceError

POLYTRACE = ("packed_lengths", "multiturn", "reward_timings", "dapo_filter")
FORMATS = (*POLYTRACE, "polytrace", "native", "run", "journal", "verl", "trl")
"""Names that ``read`` takes; ``polytrace`` is a folder with any of the first four."""
_TABLES = ("native", "run", "trl")
_LINES_LOOKED_AT = 5
_DEEPEST = 3

_MARKS: dict[str, Callable[[dict[str, Any]], bool]] = {
    "multiturn": lambda line: "turns" in line and "prompt_len" in line,
    "packed_lengths": lambda line: isinstance(line.get("output"), list) and "input" in line,
    "reward_timings": lambda line: "reward_time_s" in line,
    "dapo_filter": lambda line: "kept_prompt_indices" in line,
    "journal": lambda line: "meta" in line or ("event" in line and "decisions" in line),
    "verl": lambda line: isinstance(line.get("output"), str) and "input" in line,
}
_NAMES = {
    "packed_lengths": "packed_lengths",
    "multiturn_workload": "multiturn",
    "reward_timings": "reward_timings",
    "dapo_filter": "dapo_filter",
    "journal": "journal",
}


@dataclass(frozen=True, slots=True)
class Source:
    """The files of one task, by format, in the order of the numbers in their names."""

    task: str
    files: dict[str, list[Path]]


def sources(path: Path, format: str | None = None) -> list[Source]:
    """What to read at ``path``; a folder of folders has one task a folder.

    Raises ``TraceError`` in one line that names what was expected.
    """
    if format is not None and format not in FORMATS:
        raise TraceError(f"unknown format {format!r}; known: {', '.join(FORMATS)}")
    if not path.exists():
        raise TraceError(f"{path}: no such file or folder")
    if path.is_file():
        return [Source(path.resolve().parent.name, {_of_file(path, format): [path]})]
    found = _of_folder(path, path.resolve().name, format, 0)
    if not found:
        wanted = format or "a trace"
        raise TraceError(
            f"{path}: no files of {wanted} in this folder; expected {_expected(format)}"
        )
    return found


def _expected(format: str | None) -> str:
    if format in _TABLES:
        return "*.parquet"
    if format is not None:
        return "*.jsonl"
    return (
        "PolyTrace's *.jsonl, a run folder, verl's or TRL's dumps, a native *.parquet, or folders "
        "of these"
    )


def _of_file(path: Path, format: str | None) -> str:
    kind = format_of(path)
    if format is not None and format != "polytrace":
        if (path.suffix == ".parquet") != (format in _TABLES):
            raise TraceError(f"{path}: not {format}; expected {_expected(format)}")
        return format
    if kind is None:
        raise TraceError(f"{path}: {_why_unknown(path)}; known formats: {', '.join(FORMATS)}")
    return kind


def _why_unknown(path: Path) -> str:
    if path.suffix == ".json":
        return "a JSON file is no trace (fitted distributions are not responses)"
    if path.suffix not in (".jsonl", ".parquet"):
        return "expected *.jsonl or *.parquet"
    if not path.stat().st_size:
        return "the file is empty"
    if path.suffix == ".parquet":
        return f"not a trace: it has columns {', '.join(_column_names(path)[:6]) or 'unreadable'}"
    return "its first lines fit no format"


def _of_folder(path: Path, task: str, format: str | None, depth: int) -> list[Source]:
    files = _files(path, format)
    if files:
        _of_one_kind(path, files)
        return [Source(task, files)]
    if depth == _DEEPEST:
        return []
    found: list[Source] = []
    for folder in sorted(path.iterdir()):
        if folder.is_dir() and not folder.name.startswith("."):
            name = folder.name if depth == 0 else f"{task}/{folder.name}"
            found += _of_folder(folder, name, format, depth + 1)
    return found


def _of_one_kind(folder: Path, files: dict[str, list[Path]]) -> None:
    """The same responses in two formats, as after an import into the folder, would count twice."""
    kinds = sorted({"polytrace" if kind in POLYTRACE else kind for kind in files})
    if len(kinds) > 1:
        raise TraceError(
            f"{folder}: holds files of {' and of '.join(kinds)}; read one of them: give a file, "
            "or --format"
        )


def _files(folder: Path, format: str | None) -> dict[str, list[Path]]:
    if format in (None, "run") and _is_run(folder):
        return {"run": [folder]}
    found: dict[str, list[Path]] = {}
    for path in sorted(folder.iterdir(), key=_numbers):
        if path.is_file() and path.suffix in (".jsonl", ".parquet"):
            kind = format_of(path)
            if kind is not None and _wanted(kind, format):
                found.setdefault(kind, []).append(path)
    return found


def _wanted(kind: str, format: str | None) -> bool:
    if format == "polytrace":
        return kind in POLYTRACE
    return format is None or kind == format


def _is_run(folder: Path) -> bool:
    if (folder / "journal.jsonl").is_file():
        return True
    files = table_files(folder)
    return bool(files) and format_of(files[0]) == "run"


def _numbers(path: Path) -> list[tuple[int, str]]:
    """Sorts ``step_10`` after ``step_9``."""
    parts = re.split(r"(\d+)", path.name)
    return [(int(part), "") if part.isdigit() else (-1, part) for part in parts]


def format_of(path: Path) -> str | None:
    """The format of a file, None when it is not known. Raises ``OSError``."""
    if path.suffix == ".parquet":
        return _of_table(path)
    if path.suffix != ".jsonl":
        return None
    for line in _first_objects(path):
        for name, fits in _MARKS.items():
            if fits(line):
                return name
    return next((name for start, name in _NAMES.items() if path.name.startswith(start)), None)


def _of_table(path: Path) -> str | None:
    columns = set(_column_names(path))
    if not columns:
        return None
    if native.KEY in native.header(path):
        return "native"
    if columns.issuperset(runs.MARKS):
        return "run"
    return "trl" if columns.issuperset(trl.COLUMNS) else None


def _column_names(path: Path) -> list[str]:
    try:
        return list(pl.read_parquet_schema(path))
    except PolarsError:
        return []


def _first_objects(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    with path.open("rb") as file:
        for _, raw in zip(range(_LINES_LOOKED_AT), file, strict=False):
            try:
                value: object = json.loads(raw)
            except (ValueError, RecursionError):
                continue
            if isinstance(value, dict):
                found.append(cast(dict[str, Any], value))
    return found
