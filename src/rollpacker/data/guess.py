"""Rows whose columns nobody names, for commands that only look: what their keys of ``data`` are."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rollpacker.config import DataConfig
from rollpacker.data.base import DataError, Row
from rollpacker.data.columns.messages import is_blank
from rollpacker.data.columns.schema import columns_of
from rollpacker.data.files import Record
from rollpacker.data.identity import canonical
from rollpacker.data.load import load_rows
from rollpacker.data.read import read_records

Answers = Literal["needed", "taken", "unused"]
"""What a reward does with answers: ``taken`` ones may be missing in all rows."""

_NAMES = (
    "text",
    "instruction",
    "instructions",
    "problem_statement",
    "problem_description",
    "task_description",
    "question_text",
    "user_prompt",
    "description",
    "statement",
    "content",
    "body",
)
"""Columns of a prompt where none has one of the usual names: too common for a run to take."""
_NO_PROMPT = re.compile(
    r"(?:^|_)(?:answer|solution|code|test|case|assert|input|output|label|target|response|completion"
    r"|canonical|ground|truth|gold|reference|program|expected|result|rationale|explanation|editorial"
    r"|hint|reasoning|thought|cot|metadata|id|url|source|name|title|difficulty|level|tag|topic|date"
    r"|language|lang|starter|setup|import|entry|checker|grader|verification)s?(?:_|$)",
    re.IGNORECASE,
)
_PROGRAM = re.compile(r"^\s*(?:[\[{]|def \w|class \w|import \w|from \w|assert\b|#include)", re.M)
"""Source or JSON, which says what is right rather than what is asked."""
_NO_ANSWER, _SKIP = {"label_key": ""}, {"missing": "skip"}
_TRIED: dict[Answers, Sequence[dict[str, Any]]] = {
    "needed": ({}, _SKIP),
    "taken": ({}, _SKIP, _NO_ANSWER),
    "unused": ({}, _NO_ANSWER, _NO_ANSWER | _SKIP),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Guessed:
    """Rows that can be read.

    Args:
        keys: of ``data`` under which they can, besides the given ones.
        skipped: why some are left out; empty where none are.
        columns: among which ``keys["input_key"]`` is a guess; empty where it is none.
    """

    keys: dict[str, Any]
    rows: list[Row]
    skipped: str = ""
    columns: Sequence[str] = ()


def load_guessed(config: DataConfig, answers: Answers) -> Guessed:
    """The rows of ``config.path`` with as little left out as can be.

    Raises ``DataError`` where it is not clear which column is the prompt, or rows are wrong.
    """
    errors: list[DataError] = []
    for keys in _TRIED[answers]:
        try:
            rows = load_rows(config.model_copy(update=keys)).rows
        except DataError as error:
            errors.append(error)
        else:
            return Guessed(
                keys=keys, rows=rows, skipped=str(errors[-1]) if "missing" in keys else ""
            )
    if answers == "needed" or config.input_key:
        raise errors[0]
    columns = columns_of(record for _, record in read_records(config).rows)
    name = prompt_column(columns)
    if name is None:
        raise errors[_TRIED[answers].index(_NO_ANSWER)]
    keys = _NO_ANSWER | {"input_key": name}
    named = config.model_copy(update=keys)
    try:
        return Guessed(keys=keys, rows=load_rows(named).rows, columns=list(columns))
    except DataError as error:
        rows = load_rows(named.model_copy(update=_SKIP)).rows
        return Guessed(keys=keys | _SKIP, rows=rows, skipped=str(error), columns=list(columns))


def load_leniently(config: DataConfig) -> list[Row]:
    """Every row that has a prompt, with its answer where it has one: what one row lacks is no
    matter of the others. Raises ``DataError``."""
    try:
        return load_rows(config).rows
    except DataError:
        rows = load_guessed(config, "unused").rows
    with contextlib.suppress(DataError):
        answered = load_rows(config.model_copy(update=_SKIP)).rows
        whole = {_apart_from_answer(row): row for row in answered}
        return [whole.get(_apart_from_answer(row), row) for row in rows]
    return rows


def _apart_from_answer(row: Row) -> str:
    return canonical({**row.columns, "answer": None})


def prompt_column(columns: Record) -> str | None:
    """By its name, else the only one with prose; None where that is not clear.

    Never one that tells what is right: a solution, tests, an answer.

    Args:
        columns: each with a value that is not empty, where it has one.
    """
    texts = {
        name: value
        for name, value in columns.items()
        if isinstance(value, str) and not is_blank(value)
    }
    known = next((name for name in _NAMES if name in texts), None)
    prose = [
        name
        for name, value in texts.items()
        if " " in value.strip() and not _NO_PROMPT.search(name) and not _PROGRAM.match(value)
    ]
    return known or (prose[0] if len(prose) == 1 else None)
