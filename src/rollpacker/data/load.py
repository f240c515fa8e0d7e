"""Rows of any source in the canonical form, and one line on how they were read."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Literal

from rollpacker.config import DataConfig
from rollpacker.data.base import DataError, Record, Row, whole_text
from rollpacker.data.columns import (
    OPENRLHF,
    MissingError,
    Schema,
    check_text_only,
    columns_of,
    detect,
    is_blank,
    is_missing,
    parse_prompt,
    parse_template_kwargs,
    parse_tools,
    prompt_of,
    value_at,
)
from rollpacker.data.held_out import Excluded, canonical, distinct, excluded_by, identity
from rollpacker.data.read import read_records


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A source's rows. ``rows``: in the source's order, ids unique. ``mapping``: the detected
    schema, the columns it uses, and the rows that were dropped or renamed."""

    rows: list[Row]
    mapping: str


def load_rows(config: DataConfig) -> Loaded:
    """Read ``config.path`` and drop the rows of ``config.exclude``. Raises ``DataError``."""
    records = read_records(config)
    rows = records.rows
    if not rows:
        raise DataError(f"data.path: '{records.name}' has no rows")
    schema = detect([record for _, record in rows], config, records.name)
    excluded = excluded_by(config)
    taken = _Taken(answered=_answered([record for _, record in rows], schema))
    for where, record in rows:
        if config.size and len(taken.rows) == config.size:
            break
        taken.add(record, schema, where, excluded)
    if taken.missing and (config.missing == "error" or not taken.rows):
        raise DataError(_missing(taken, config))
    if not taken.rows:
        raise DataError(f"data.exclude: '{config.exclude}' holds every row of '{records.name}'")
    unique, named = distinct(taken.rows, records.name)
    notes = [f"{records.name}: {len(unique)} rows, {schema.describe()}, {named[0]}"]
    if taken.cut:
        notes.append(f"the assistant's last turn is cut from {taken.cut} prompts")
    notes += [*named[1:], *excluded.notes(config.exclude)]
    if taken.missing:
        notes.append(f"{len(taken.missing)} incomplete rows skipped, first {taken.missing[0]}")
    return Loaded(rows=unique, mapping="; ".join(notes))


@dataclass(slots=True, kw_only=True)
class _Taken:
    # The rows read so far. ``answered``: domains with an answer in some row.

    answered: Set[Any]
    rows: list[Row] = field(default_factory=list[Row])
    missing: list[str] = field(default_factory=list[str])
    cut: int = 0

    def add(self, record: Record, schema: Schema, where: str, excluded: Excluded) -> None:
        try:
            row, cut = _row(record, schema, where)
            blank = isinstance(row.answer, str) and is_blank(row.answer)
            if blank and _domain_at(record, schema) in self.answered:
                raise MissingError(f"{where}: the answer in column '{schema.answer}' is empty")
        except MissingError as error:
            self.missing.append(str(error))
            return
        if excluded.takes(row):
            return
        self.rows.append(row)
        self.cut += cut


def _answered(records: Sequence[Record], schema: Schema) -> set[Any]:
    # Domains with an answer in some row. In others, an empty answer means that none is needed.
    if schema.answer is None:
        return set()
    return {
        _domain_at(record, schema)
        for record in records
        if not is_blank(value_at(record, schema.answer))
    }


def _domain_at(record: Record, schema: Schema) -> str:
    return str(value_at(record, schema.domain)) if schema.domain else ""


def _missing(taken: _Taken, config: DataConfig) -> str:
    count = len(taken.missing)
    others = f" (and {count - 1} rows more)" if count > 1 else ""
    if config.missing == "skip":
        return f"data.missing: skip leaves no row: {taken.missing[0]}{others}"
    return f"{taken.missing[0]}{others}: set data.missing: skip to leave such rows out"


def _row(record: Record, schema: Schema, where: str) -> tuple[Row, bool]:
    check_text_only(record, where)
    value = prompt_of(record, schema.prompt, where)
    if is_missing(value):
        raise MissingError(f"{where}: no prompt in column '{schema.prompt.column}'")
    prompt, gold = parse_prompt(value, where)
    answer = _answer(record, schema, gold, where)
    row = Row(
        id=identity(record, prompt, answer, where),
        prompt=prompt,
        answer=answer,
        domain=_domain(record, schema, where),
        columns=record | {"answer": answer} if schema.answer or schema.gold else record,
        tools=parse_tools(record, where),
        template_kwargs=parse_template_kwargs(record, where),
    )
    return row, gold is not None


def _answer(record: Record, schema: Schema, gold: str | None, where: str) -> Any:
    if schema.gold:
        if not gold:
            raise MissingError(
                f"{where}: no answer: the prompt does not end in a text of the assistant"
            )
        return gold
    if schema.answer is None:
        return None
    answer = value_at(record, schema.answer)
    if is_missing(answer) and not gold:
        raise MissingError(f"{where}: no answer in column '{schema.answer}'")
    return gold if is_missing(answer) else answer


def _domain(record: Record, schema: Schema, where: str) -> str:
    domain = value_at(record, schema.domain) if schema.domain else "default"
    if is_missing(domain) and schema.name == OPENRLHF:
        return "default"
    if is_missing(domain):
        raise MissingError(f"{where}: no domain in column '{schema.domain}' (data.domain_key)")
    return whole_text(str(domain), f"{where}: the domain")


# --- Rows whose columns are guessed, for commands that only inspect data

Answers = Literal["needed", "taken", "unused"]
"""How a reward uses answers. ``taken`` ones may be missing in all rows."""

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
"""Columns of a prompt if none has a usual name. They are too common for a run to use unasked."""
_NO_PROMPT = re.compile(
    r"(?:^|_)(?:answer|solution|code|test|case|assert|input|output|label|target|response|completion"
    r"|canonical|ground|truth|gold|reference|program|expected|result|rationale|explanation|editorial"
    r"|hint|reasoning|thought|cot|metadata|id|url|source|name|title|difficulty|level|tag|topic|date"
    r"|language|lang|starter|setup|import|entry|checker|grader|verification)s?(?:_|$)",
    re.IGNORECASE,
)
_PROGRAM = re.compile(r"^\s*(?:[\[{]|def \w|class \w|import \w|from \w|assert\b|#include)", re.M)
"""Source or JSON, which is a solution rather than a question."""
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
        keys: of ``data`` that make them readable, besides the given ones.
        skipped: why some are left out, empty if none are.
        columns: the candidates if ``keys["input_key"]`` is a guess, else empty.
    """

    keys: dict[str, Any]
    rows: list[Row]
    skipped: str = ""
    columns: Sequence[str] = ()


def load_guessed(config: DataConfig, answers: Answers) -> Guessed:
    """Return the rows of ``config.path``, with as few left out as possible. Raises ``DataError`` if
    the prompt column is not clear, or rows are wrong."""
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
    """Return every row that has a prompt, with its answer if it has one. Raises ``DataError``."""
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
    """Choose the column by its name, else the only one with prose. None if that is not clear. Never
    a solution, tests or an answer."""
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
