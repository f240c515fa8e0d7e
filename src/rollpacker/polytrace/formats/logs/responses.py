"""Read responses from the records of a log, and training steps from file names."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import polars as pl
from polars.exceptions import PolarsError

from rollpacker.polytrace.formats.files import Problem, Reading, Record, bare, entries, shown
from rollpacker.polytrace.formats.logs import texts
from rollpacker.polytrace.formats.logs.layouts import LAYOUTS, LogLayout
from rollpacker.polytrace.formats.logs.texts import values

# --- The training step in names of files and folders: one rule for all trainers

_STEP, _ROUND, _EPOCH = (
    re.compile(rf"(?:{words})s?[_\-=. ]?(\d{{1,9}})(?!\d)", re.IGNORECASE)
    for words in ("step", "iteration|iter|rollout", "epoch")
)
"""The most telling first: of ``epoch_0_step_3`` and ``rollout_7_step_3`` it is the 3."""
_DATE = re.compile(
    r"(?<!\d)(?:19|20)\d\d([_\-.]?)(?:0[1-9]|1[0-2])\1(?:0[1-9]|[12]\d|3[01])(?!\d)[_\-]?"
)
_TIME = re.compile(r"(?<!\d)[T_\- ]?(?:[01]\d|2[0-3])([_\-.:]?)[0-5]\d\1[0-5]\d(?!\d)[_\-]?")
_OTHER = re.compile(
    r"(?:epoch|rank|worker|shard|part|node|gpu|dp|tp|pp|proc|seed|v)[_\-=]?\d+"
    r"(?:[_\-]?of[_\-]?\d+)?",
    re.IGNORECASE,
)
_NUMBER = re.compile(r"(?<![a-zA-Z\d])(\d{1,9})(?![a-zA-Z\d])")
_LAST = re.compile(r"(?<!\d)(\d{1,9})$")
_FOLDER = re.compile(r"(?:^|[_\-.])(?:global_)?steps?[_\-=.]?(\d{1,9})(?!\d)", re.IGNORECASE)
_FOLDERS_UP = 4


def in_name(path: Path, numbers: bool) -> int | None:
    """Return the number after the word step, in the file's name or else in a folder's.

    With ``numbers``, else the last number of the file's name that is no rank, shard or part. A date
    is no step, nor is the time after it if another number is left.
    """
    name = bare(path).partition(".json")[0].removesuffix(".parquet").removesuffix(".table")
    undated = _DATE.sub("", name)
    if undated != name:
        told = _in_text(_TIME.sub("", undated, count=1), path, numbers)
        if told is not None:
            return told
    return _in_text(undated, path, numbers)


def _in_text(name: str, path: Path, numbers: bool) -> int | None:
    told = _STEP.search(name) or _ROUND.search(name) or _above(path)
    if told is None and numbers:
        rest = _OTHER.sub("", name)
        found = _NUMBER.findall(rest)
        if found:
            return int(found[-1])
        told = _LAST.search(rest)
    told = told or _EPOCH.search(name)
    return None if told is None else int(told[1])


def _above(path: Path) -> re.Match[str] | None:
    folders = path.resolve().parts[-1 - _FOLDERS_UP : -1]
    return next((told for name in reversed(folders) if (told := _FOLDER.search(name))), None)


def is_of_steps(folder: Path) -> bool:
    """Whether a folder holds a step's files instead of a task."""
    return _FOLDER.search(folder.name) is not None


@dataclass(frozen=True, slots=True)
class LoggedResponse:
    """One response of a log.

    Args:
        where: its place in the file, for messages.
        line: of the file, 0 in a table.
        unit: number of the line or row that holds many responses. 0 if the file is the unit.
        completion: texts of all speakers. None if there are no texts.
        step: of training. None if unknown.
    """

    where: str
    line: int
    unit: int
    record: Record
    prompt: object
    completion: object
    step: int | None
    validation: bool


class PromptIds:
    """Ids of prompts, by content, the same in every step and file. The log's own id is valid
    within a step. It separates equal prompts of the step, and joins different texts with one id."""

    def __init__(self, layout: LogLayout) -> None:
        self._layout = layout
        self._own: dict[tuple[object, ...], str] = {}
        self._times: Counter[tuple[object, ...]] = Counter()

    def of(self, response: LoggedResponse) -> str:
        """Return the id of the response's prompt, including its images."""
        record, step = response.record, (response.step, response.validation)
        seen = record.get("images") or record.get("image")
        text = texts.identity(response.prompt) + (texts.identity(seen) if seen else "")
        content = texts.prompt_id(text)
        own = texts.first(record, self._layout.group)
        if not isinstance(own, str | int):
            return content
        if (*step, own) not in self._own:
            times = self._times[*step, content]
            self._times[*step, content] += 1
            self._own[*step, own] = f"{content}-{times}" if times else content
        return self._own[*step, own]


_SPLIT = re.compile(
    r"(?:^|[_\-.])(?:(train|training|rollouts?)|(?:val|valid|validation|eval|evaluation))"
    r"(?:[_\-.\d]|$)",
    re.IGNORECASE,
)


def responses(path: Path, kind: str, reading: Reading) -> Iterator[LoggedResponse]:
    """Yield each response of a file. ``reading`` gets the mistakes. Raises ``OSError``."""
    layout = LAYOUTS[kind]
    named = in_name(path, layout.numbers)
    validation = _is_validation(path)
    table = bare(path).endswith(".parquet")
    if table and (missing := _missing(path, layout)):
        reading.bad(Problem(path, 0, f"column {missing} is missing"))
        return
    for number, entry in entries(path, reading):
        where, line = (f"row {number}: ", 0) if table else ("", number)
        unit = number if layout.shape == "columns" else 0
        try:
            for record in _split(entry, layout):
                prompt, completion, step = _told(record, layout, named)
                evaluates = validation or record.get("mode") == "eval"
                yield LoggedResponse(where, line, unit, record, prompt, completion, step, evaluates)
        except ValueError as error:
            reading.bad(Problem(path, line, f"{where}{error}"))


def _is_validation(path: Path) -> bool:
    names = (path.name, *(folder.name for folder in list(path.resolve().parents)[:2]))
    told = next((found for name in names if (found := _SPLIT.search(name))), None)
    return told is not None and told[1] is None


def _missing(path: Path, layout: LogLayout) -> str | None:
    try:
        names = pl.read_parquet_schema(path)
    except (PolarsError, OSError):
        return None
    return next((key for key in layout.needs if key not in names), None)


def _split(entry: Record, layout: LogLayout) -> Iterator[Record]:
    missing = next((key for key in layout.needs if key not in entry), None)
    if missing is not None:
        raise ValueError(f"{missing}: missing")
    if layout.shape == "columns":
        yield from _of_columns(entry, layout.needs[0])
    elif layout.shape == "singles":
        yield {key: _single(value) for key, value in entry.items()}
    elif layout.shape == "traces":
        yield from _of_traces(entry)
    else:
        yield entry


def _of_columns(entry: Record, key: str) -> Iterator[Record]:
    columns = {
        name: cast(list[Any], value) for name, value in entry.items() if isinstance(value, list)
    }
    if key not in columns:
        raise ValueError(f"{key}: expected a list, got {shown(entry[key])}")
    size = len(columns[key])
    for name, column in columns.items():
        if len(column) != size:
            raise ValueError(f"{name}: {len(column)} entries, but {key} has {size}")
    for place in range(size):
        yield {**entry, **{name: column[place] for name, column in columns.items()}}


def _single(value: object) -> Any:
    if not isinstance(value, list):
        return value
    entries = cast(list[Any], value)
    return entries[0] if len(entries) == 1 else entries


def _of_traces(entry: Record) -> Iterator[Record]:
    """Traces of the trained agents. ``sampled`` holds the model's messages."""
    given = entry["traces"]
    if not isinstance(given, list):
        raise ValueError(f"traces: expected a list, got {shown(given)}")
    shared = {key: value for key, value in entry.items() if key not in ("traces", "id")}
    for trace in cast(list[Any], given):
        if not isinstance(trace, dict):
            raise ValueError(f"traces: expected JSON objects, got {shown(trace)}")
        told = cast(Record, trace)
        if values(told, "agent.trainable") == [False]:
            continue
        nodes = cast(list[Any], told["nodes"]) if isinstance(told.get("nodes"), list) else []
        said = [node["message"] for node in nodes if values(node, "sampled") == [True]]
        yield {**shared, **told, "sampled": said}


def _told(
    record: Record, layout: LogLayout, named: int | None
) -> tuple[object, object, int | None]:
    if layout.prefix is not None:
        prompt, completion = _before(record, layout.prefix), None
    elif layout.conversation:
        prompt, completion = texts.sides(record.get(layout.conversation))
    else:
        prompt = texts.first(record, layout.prompt)
        completion = texts.first(record, layout.response)
        check_text(prompt, layout.prompt[0])
        _check_single(completion, layout)
        completion = texts.with_reasoning(completion, record.get(texts.REASONING))
    step = texts.step(texts.first(record, layout.step), layout.step[:1])
    step = named if step is None else step
    if step is None and not layout.stepless:
        raise ValueError(f"step: missing, and the file's name has none (read as {layout.title})")
    return prompt, completion, step


def _check_single(completion: object, layout: LogLayout) -> None:
    """Raise ``ValueError`` if one response is several texts, which count only together."""
    if not isinstance(completion, list):
        return
    parts = cast(list[Any], completion)
    if parts and all(isinstance(part, str) for part in parts):
        raise ValueError(
            f"{layout.response[0]}: expected one response, got a list of {len(parts)} texts: write "
            f"a line for each (read as {layout.title})"
        )


def check_text(value: object, name: str) -> None:
    """Raise ``ValueError`` if a value is neither a text nor messages."""
    if value is None:
        raise ValueError(f"{name}: missing")
    if not isinstance(value, str | list | dict):
        raise ValueError(f"{name}: expected text, got {shown(value)}")


def _before(record: Record, keys: tuple[str, str]) -> list[Any]:
    ids, mask = (record.get(key) for key in keys)
    if not isinstance(ids, list) or not isinstance(mask, list):
        raise ValueError(f"{keys[0]}, {keys[1]}: expected lists")
    flags = cast(list[Any], mask)
    start = next((at for at, flag in enumerate(flags) if flag), len(flags))
    return cast(list[Any], ids)[:start]
