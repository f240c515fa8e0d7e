"""JSON lines: reading them with line-numbered problems, and checking their fields."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from rollpacker.polytrace.schema import TraceError

Record = dict[str, Any]
"""One line: a JSON object."""
Note = Callable[[str], None]
"""Told, in one line each, what a reader approximated or a writer left out."""

MOST = 2**31 - 1
"""Counts are stored in 32 bits."""


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong with a line; ``line`` 0 stands for the whole file."""

    file: Path
    line: int
    text: str

    def __str__(self) -> str:
        where = f", line {self.line}" if self.line else ""
        return f"{self.file}{where}: {self.text}"


Bad = Callable[[Problem], None]


class FieldError(ValueError):
    """A field of a line is missing or wrong; the message begins with the field's name."""


def stop(problem: Problem) -> None:
    """The reaction of a reader to its first problem. Raises ``TraceError``."""
    raise TraceError(str(problem))


def records(
    path: Path, check: Callable[[Record], None], bad: Bad = stop
) -> Iterator[tuple[int, Record]]:
    """Yield ``(line number, object)`` of each good line; ``bad`` is told of the others.

    Args:
        path: a file of JSON lines; blank lines are skipped.
        check: raises ``FieldError`` when a field is wrong.
        bad: raises ``TraceError`` by default.
    """
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            if not raw.strip():
                continue
            try:
                record = _object(raw)
                check(record)
            except FieldError as error:
                bad(Problem(path, number, str(error)))
            else:
                yield number, record


def _object(raw: bytes) -> Record:
    try:
        value: object = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise FieldError("not UTF-8 text") from error
    except json.JSONDecodeError as error:
        torn = "" if raw.endswith(b"\n") else "; the file ends within this line"
        raise FieldError(f"not JSON ({error.msg} at column {error.colno}{torn})") from error
    if not isinstance(value, dict):
        raise FieldError(f"expected a JSON object, got {_short(value)}")
    return cast(Record, value)


def integer(record: Mapping[str, Any], key: str, *, least: int = 0) -> int:
    """The whole number ``record[key]``, at least ``least``. Raises ``FieldError``."""
    if key not in record:
        raise FieldError(f"{key}: missing")
    return _whole(record[key], key, least)


def integers(record: Mapping[str, Any], key: str) -> list[int]:
    """The list of non-negative whole numbers ``record[key]``. Raises ``FieldError``."""
    values = items(record, key)
    return [_whole(value, f"{key}[{place}]", 0) for place, value in enumerate(values)]


def items(record: Mapping[str, Any], key: str) -> list[Any]:
    """The list ``record[key]``. Raises ``FieldError``."""
    if key not in record:
        raise FieldError(f"{key}: missing")
    if not isinstance(record[key], list):
        raise FieldError(f"{key}: expected a list, got {_short(record[key])}")
    return cast(list[Any], record[key])


def number(record: Mapping[str, Any], key: str) -> float:
    """The finite number ``record[key]``, at least 0. Raises ``FieldError``."""
    if key not in record:
        raise FieldError(f"{key}: missing")
    value = record[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise FieldError(f"{key}: expected a number, got {_short(value)}")
    if value < 0:
        raise FieldError(f"{key}: expected 0 or more, got {value}")
    return float(value)


def text(record: Mapping[str, Any], key: str) -> str:
    """The string ``record[key]``. Raises ``FieldError``."""
    if key not in record:
        raise FieldError(f"{key}: missing")
    if not isinstance(record[key], str):
        raise FieldError(f"{key}: expected text, got {_short(record[key])}")
    return cast(str, record[key])


def flag(record: Mapping[str, Any], key: str) -> bool:
    """``record[key]``, false where it is missing. Raises ``FieldError``."""
    value = record.get(key, False)
    if not isinstance(value, bool):
        raise FieldError(f"{key}: expected true or false, got {_short(value)}")
    return value


def optional(record: Mapping[str, Any], key: str, check: Callable[..., object]) -> None:
    """Apply ``check`` to a field that may be missing or null. Raises ``FieldError``."""
    if record.get(key) is not None:
        check(record, key)


def count_of(record: Mapping[str, Any], key: str, of: str) -> None:
    """Where there is a count ``key``, it equals the length of the list ``of``."""
    if record.get(key) is not None and integer(record, key) != len(record[of]):
        raise FieldError(f"{key}: {record[key]}, but {of} has {len(record[of])} entries")


def _whole(value: object, name: str, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise FieldError(f"{name}: expected a whole number, got {_short(value)}")
    if not least <= value <= MOST:
        raise FieldError(f"{name}: expected {least} to {MOST}, got {value}")
    return value


def _short(value: object) -> str:
    shown = json.dumps(value)
    return shown if len(shown) <= 40 else shown[:37] + "..."
