"""Detect the format of a file or folder by its content, or by its name if the file is torn."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import polars as pl
from polars.exceptions import PolarsError

from rollpacker.core.sample_table import files as table_files
from rollpacker.errors import first_line
from rollpacker.polytrace.formats import files
from rollpacker.polytrace.formats.files import Problem, bare, beginning
from rollpacker.polytrace.formats.logs import responses
from rollpacker.polytrace.formats.logs.layouts import COMPANIONS, LAYOUTS, layout_of
from rollpacker.polytrace.formats.ours import native, runs
from rollpacker.polytrace.formats.suite import SUITE
from rollpacker.polytrace.schema import SAMPLES, TraceError

FORMATS = (*SUITE, "polytrace", "native", "run", "journal", *LAYOUTS)
"""Names that ``read`` takes. ``polytrace`` is a folder with any of the first four."""
_TABLES = ("native", "run")
_SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet")
_NEARLY = 2  # A table that lacks at most this many columns counts as a damaged native trace
_DEEPEST = 3
_DEEPEST_IN_STEP = 6
_PICKLES = {
    ".pt": "a pickle of torch's",
    ".pth": "a pickle of torch's",
    ".pkl": "a pickle",
    ".pickle": "a pickle",
    ".bin": "a binary file",
}
_NO_LOGS = ("", ".md", ".yaml", ".yml", ".toml", ".html", ".png", ".svg", ".log", ".lock", ".py")
"""Suffixes of files that are no logs. They are skipped without a message."""


def _is_lengths(output: object) -> bool:
    """Whether it may be a list of lengths. Texts are responses of some trainer's log."""
    return isinstance(output, list) and not any(
        isinstance(each, str) for each in cast(list[Any], output)
    )


_MARKS: dict[str, Callable[[dict[str, Any]], bool]] = {
    "multiturn": lambda line: "turns" in line and "prompt_len" in line,
    "packed_lengths": lambda line: "input" in line and _is_lengths(line.get("output")),
    "reward_timings": lambda line: "reward_time_s" in line,
    "dapo_filter": lambda line: "kept_prompt_indices" in line,
    "journal": lambda line: "meta" in line or ("event" in line and "decisions" in line),
}
_NAMES = {**{form.file: name for name, form in SUITE.items()}, "journal": "journal"}
_TITLES = {
    "packed_lengths": "PolyTrace's lengths",
    "multiturn": "PolyTrace's turns",
    "reward_timings": "PolyTrace's timings of rewards",
    "dapo_filter": "PolyTrace's filters",
    "native": "a native trace",
    "run": "a run of rollpacker",
    "journal": "a journal of rollpacker",
    **{name: layout.title for name, layout in LAYOUTS.items()},
}


@dataclass(frozen=True, slots=True)
class TaskFiles:
    """The files of one task, by format, in the order of the numbers in their names. ``left`` are
    files that cannot be read, ``notes`` other omissions."""

    task: str
    files: dict[str, list[Path]]
    left: list[Problem] = field(default_factory=list[Problem])
    notes: list[str] = field(default_factory=list[str])


def sources(path: Path, format: str | None = None) -> list[TaskFiles]:
    """Return the files to read at ``path``. In a folder of folders, each is one task. Raises
    ``TraceError`` in one line that names the expected files."""
    if format is not None and format not in FORMATS:
        raise TraceError(f"unknown format {format!r}; known: {', '.join(FORMATS)}")
    if not path.exists():
        raise TraceError(f"{path}: no such file or folder")
    if path.is_file():
        return [TaskFiles(path.resolve().parent.name, {_of_file(path, format): [path]})]
    left: list[Problem] = []
    found = _of_folder(path, path.resolve().name, format, 0, left)
    if not found:
        wanted = format or "a trace"
        seen = f"; {left[0]}" if left else ""
        raise TraceError(
            f"{path}: no files of {wanted} in this folder; expected {_expected(format)}{seen}"
        )
    return found


def titles(path: Path, format: str | None = None) -> list[str]:
    """Name the formats detected at ``path``. Raises ``TraceError``."""
    kinds = {kind: None for source in sources(path, format) for kind in source.files}
    return [_TITLES[kind] for kind in kinds]


def _expected(format: str | None) -> str:
    if format in _TABLES:
        return "*.parquet"
    if format in LAYOUTS:
        return f"{LAYOUTS[format].title}, *.jsonl, *.json or *.parquet"
    if format is not None:
        return "*.jsonl"
    return (
        "PolyTrace's *.jsonl, a run folder, a trainer's dumps (verl, TRL, ms-swift, SkyRL, ROLL, "
        "prime-rl, NeMo RL, slime, OpenRLHF), a native *.parquet, or folders of these"
    )


def _of_file(path: Path, format: str | None) -> str:
    kind = format_of(path)
    if format is not None and format != "polytrace":
        suffix = _suffix(path)
        if suffix not in _SUFFIXES or (
            (suffix == ".parquet") != (format in _TABLES) and format not in LAYOUTS
        ):
            raise TraceError(f"{path}: not {format}; expected {_expected(format)}")
        return format
    if kind is None:
        raise TraceError(f"{path}: {_why_unknown(path)}; known formats: {', '.join(FORMATS)}")
    return kind


def _suffix(path: Path) -> str:
    return Path(bare(path)).suffix


def _why_unknown(path: Path) -> str:
    suffix = _suffix(path)
    if suffix in _PICKLES:
        return (
            f"{_PICKLES[suffix]}, which can run code when it is opened: write its samples as "
            "lines of JSON (docs/polytrace.md shows how)"
        )
    if suffix not in _SUFFIXES:
        return "expected *.jsonl or *.parquet, or *.json; lines also as .gz or .zst"
    if not path.stat().st_size:
        return "the file is empty"
    if suffix == ".parquet":
        try:
            columns = list(pl.read_parquet_schema(path))
        except (PolarsError, OSError) as error:
            return f"not a parquet file ({first_line(error)})"
        return _no_table(columns)
    first, problem = beginning(path)
    if problem or not first:
        return problem or "no record in it"
    keys = ", ".join(list(first[0])[:6]) or "(none)"
    return f"with keys {keys} its first lines fit no format"


def _no_table(columns: Sequence[str]) -> str:
    missing = [name for name in SAMPLES if name not in columns]
    if len(missing) <= _NEARLY:
        lacks = f"the column {', '.join(missing)}" if missing else "a native trace's metadata"
        return f"no native trace: it lacks {lacks}"
    return f"not a trace: it has columns {', '.join(columns[:6])}"


def _of_folder(
    path: Path, task: str, format: str | None, depth: int, left: list[Problem]
) -> list[TaskFiles]:
    source = _source(path, task, format)
    if source.files:
        _of_one_kind(path, source.files)
        return [source]
    left += source.left
    if depth == _DEEPEST:
        return []
    found: list[TaskFiles] = []
    for folder in sorted(path.iterdir()):
        if folder.is_dir() and not folder.name.startswith("."):
            name = folder.name if depth == 0 else f"{task}/{folder.name}"
            found += _of_folder(folder, name, format, depth + 1, left)
    return found


def _of_one_kind(folder: Path, files: dict[str, list[Path]]) -> None:
    """Refuse two formats in one folder: after an import into it, responses would count twice."""
    kinds = sorted({"polytrace" if kind in SUITE else kind for kind in files})
    if len(kinds) > 1:
        raise TraceError(
            f"{folder}: holds files of {' and of '.join(kinds)}. Read one of them: give a file, "
            "or --format"
        )


def _source(folder: Path, task: str, format: str | None) -> TaskFiles:
    if format in (None, "run") and _is_run(folder):
        return TaskFiles(task, {"run": [folder]})
    found = TaskFiles(task, {})
    for path in sorted(_gathered(folder, found.notes, 0), key=_numbers):
        kind = format_of(path)
        if kind is not None and _wanted(kind, format):
            found.files.setdefault(kind, []).append(path)
        elif kind is None and _suffix(path) not in _NO_LOGS and path.name not in COMPANIONS:
            found.left.append(Problem(path, 0, _why_unknown(path)))
    return found


def _gathered(folder: Path, notes: list[str], within: int) -> Iterator[Path]:
    below = sorted(folder.iterdir())
    names = {path.name for path in below if path.is_dir()}
    for path in below:
        if path.name.startswith("."):
            continue
        if path.is_file():
            yield path
        elif {"all", "effective"} <= names and path.name == "effective":
            notes.append(f"{path}: a part of {path.parent / 'all'}: counted once")
        elif within < _DEEPEST_IN_STEP and (
            within or responses.is_of_steps(path) or responses.is_of_steps(folder)
        ):
            yield from _gathered(path, notes, within + 1)


def _wanted(kind: str, format: str | None) -> bool:
    if format == "polytrace":
        return kind in SUITE
    return format is None or kind == format


def _is_run(folder: Path) -> bool:
    if (folder / "journal.jsonl").is_file():
        return True
    files = table_files(folder)
    return bool(files) and format_of(files[0]) == "run"


def _numbers(path: Path) -> list[tuple[int, str]]:
    parts = re.split(r"(\d+)", str(path))
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]


def format_of(path: Path) -> str | None:
    """Return the format of a file, or None if it is unknown. Raises ``OSError``."""
    suffix = _suffix(path)
    if suffix == ".parquet":
        return _of_table(path)
    if suffix not in _SUFFIXES:
        return None
    state = path.stat()
    return _of_records(path, state.st_size, state.st_mtime_ns)


@lru_cache(maxsize=1 << 16)
def _of_records(path: Path, size: int, changed_ns: int) -> str | None:
    """Detect by a file's first records. Cached, since a line may hold a whole step."""
    del size, changed_ns
    suffix = _suffix(path)
    first, _ = beginning(path)
    for record in first:
        for name, fits in _MARKS.items():
            if fits(record) and suffix != ".json":
                return None if name == "journal" and files.packing(path) else name
        if kind := layout_of(record):
            return kind
    named = (name for start, name in _NAMES.items() if path.name.startswith(start))
    return next(named, None) if path.suffix == ".jsonl" else None


def _of_table(path: Path) -> str | None:
    try:
        columns = dict.fromkeys(pl.read_parquet_schema(path))
    except (PolarsError, OSError):
        return None
    if native.KEY in native.header(path):
        return "native"
    if columns.keys() >= set(runs.MARKS):
        return "run"
    return layout_of(columns)
