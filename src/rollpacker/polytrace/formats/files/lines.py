"""JSON lines: reading them with line-numbered problems, and the types of their fields."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, cast

from pydantic import BaseModel, Field, InstanceOf, ValidationError

from rollpacker.polytrace.formats.files import opened
from rollpacker.polytrace.schema import TraceError

Record = dict[str, Any]
"""One line: a JSON object."""
Note = Callable[[str], None]
"""Told, in one line each, what a reader approximated or a writer left out."""


def silent(_: str) -> None:
    """A ``Note`` where nobody wants to know."""


MOST = 2**31 - 1
"""Counts are stored in 32 bits."""

Count = Annotated[int, Field(strict=True, ge=0, le=MOST)]
Number = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
Text = InstanceOf[str]
"""Lone surrogates too, which a ``str`` of pydantic's might not take."""

_EXPECTED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "finite_number": "a number",
    "is_instance_of": "text",
    "bool_type": "true or false",
    "list_type": "a list",
}
"""By pydantic's name of the problem."""


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


def stop(problem: Problem) -> None:
    """The reaction of a reader to its first problem. Raises ``TraceError``."""
    raise TraceError(str(problem))


def records(path: Path, model: type[BaseModel], bad: Bad) -> Iterator[tuple[int, Record]]:
    """Yield ``(line number, object)`` of each good line; ``bad`` is told of the others.

    Blank lines are skipped, and keys that ``model`` lacks are let through.
    """
    number = 0
    try:
        for number, raw in enumerate(opened.lines(path), start=1):
            if not raw.strip():
                continue
            try:
                record = parsed(raw)
                model.model_validate(record)
            except ValidationError as error:
                bad(Problem(path, number, _said(error)))
            except ValueError as error:
                bad(Problem(path, number, str(error)))
            else:
                yield number, record
    except opened.TornError as error:
        bad(Problem(path, number + 1, str(error)))


def parsed(raw: bytes) -> Record:
    """The JSON object of a line. Raises ``ValueError``."""
    try:
        value: object = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError("not UTF-8 text") from error
    except json.JSONDecodeError as error:
        torn = "" if raw.endswith(b"\n") else "; the file ends within this line"
        raise ValueError(f"not JSON ({error.msg} at column {error.colno}{torn})") from error
    except RecursionError as error:
        raise ValueError("not JSON (nested too deeply)") from error
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, got {shown(value)}")
    return cast(Record, value)


def _said(error: ValidationError) -> str:
    """The first problem: its field, what was expected there and what was found."""
    first = error.errors(include_url=False)[0]
    kind, value, about = first["type"], first["input"], first.get("ctx", {})
    if kind == "value_error":
        return str(about["error"])
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])
    name = "".join(parts).removeprefix(".")
    if kind == "missing":
        return f"{name}: missing"
    if kind == "model_type":
        return f"{name}: expected a JSON object"
    if kind in _EXPECTED:
        return f"{name}: expected {_EXPECTED[kind]}, got {shown(value)}"
    least = about.get("ge", 0)
    bounds = "0 or more" if isinstance(least, float) else f"{least} to {MOST}"
    return f"{name}: expected {bounds}, got {value}"


def same_count(name: str, told: int | None, of: str, entries: Sequence[object]) -> None:
    """Raise ``ValueError`` where there is a count and the list ``of`` has another length."""
    if told is not None and told != len(entries):
        raise ValueError(f"{name}: {told}, but {of} has {len(entries)} entries")


def shown(value: object) -> str:
    """A value as a message shows it."""
    told = json.dumps(value, default=str)
    return told if len(told) <= 40 else told[:37] + "..."
