"""Rows of any source in the canonical form, and one line that says how they were read."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from rollpacker.config import DataConfig
from rollpacker.data.base import DataError, Row, whole_text
from rollpacker.data.columns.layouts import prompt_of, value_at
from rollpacker.data.columns.messages import (
    MissingError,
    check_text_only,
    is_blank,
    is_missing,
    parse_prompt,
    parse_template_kwargs,
    parse_tools,
)
from rollpacker.data.columns.schema import OPENRLHF, Schema, detect
from rollpacker.data.files import Record
from rollpacker.data.held_out import Excluded, excluded_by
from rollpacker.data.identity import distinct, identity
from rollpacker.data.read import read_records


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A source's rows.

    Args:
        rows: in the source's order, ids unique.
        mapping: the detected schema, which column went where, and what was dropped or renamed.
    """

    rows: list[Row]
    mapping: str


def load_rows(config: DataConfig) -> Loaded:
    """Read ``config.path`` and drop what ``config.exclude`` holds. Raises ``DataError``."""
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
    """What was read of a source so far.

    Args:
        answered: domains of which some row has an answer.
    """

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
    """Domains of which some row has an answer: in others, an empty one says that none is needed."""
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
    """A row, and whether its prompt ended in the reference answer."""
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
                f"{where}: no turn of the assistant ends the prompt in text, so no answer"
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
