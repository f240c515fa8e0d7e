"""Rows of any source in the canonical form, and one line that says how they were read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollpacker.config import DataConfig
from rollpacker.core.types import PromptId
from rollpacker.data.base import DataError, Row
from rollpacker.data.read import Record, read_records
from rollpacker.data.schema import Schema, detect, parse_prompt, prompt_column, value_at


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
    if not records:
        raise DataError(f"data.path: '{config.path}' has no rows")
    schema = detect(records[0], config, config.path)
    excluded = _exclusions(config) if config.exclude else _Exclusions(frozenset(), frozenset())
    rows: list[Row] = []
    dropped = 0
    for number, record in enumerate(records):
        row = _row(record, schema, f"{config.path}, row {number}")
        if excluded.holds(row):
            dropped += 1
        elif config.size and len(rows) == config.size:
            break
        else:
            rows.append(row)
    if not rows:
        raise DataError(f"data.exclude: '{config.exclude}' holds every row of '{config.path}'")
    rows, repeated = _unique(rows, config.path)
    return Loaded(rows=rows, mapping=_describe(config, schema, rows, dropped, repeated))


def _describe(
    config: DataConfig, schema: Schema, rows: Sequence[Row], dropped: int, repeated: int
) -> str:
    ids = "id <- id" if "id" in rows[0].columns else "id <- hash of prompt and answer"
    notes = [f"{config.path}: {len(rows)} rows, {schema.describe()}, {ids}"]
    if repeated:
        notes.append(f"{repeated} identical rows renamed with #2, #3 ...")
    if dropped:
        notes.append(f"{dropped} rows dropped that are in {config.exclude}")
    return "; ".join(notes)


def _row(record: Record, schema: Schema, where: str) -> Row:
    if schema.prompt not in record and "." not in schema.prompt:
        raise DataError(f"{where}: no column '{schema.prompt}'")
    prompt = parse_prompt(value_at(record, schema.prompt), where)
    answer = value_at(record, schema.answer) if schema.answer else None
    if schema.answer and answer is None:
        raise DataError(f"{where}: no answer in column '{schema.answer}'")
    domain = value_at(record, schema.domain) if schema.domain else "default"
    if domain is None:
        raise DataError(f"{where}: no domain in column '{schema.domain}' (data.domain_key)")
    return Row(
        id=_identity(record, prompt, answer),
        prompt=prompt,
        answer=answer,
        domain=str(domain),
        columns=record if schema.answer is None else record | {"answer": answer},
    )


def _identity(record: Record, prompt: Any, answer: Any) -> PromptId:
    if record.get("id") is not None:
        return PromptId(str(record["id"]))
    text = f"{_canonical(prompt)}\n{_canonical(answer)}".encode()
    return PromptId(hashlib.blake2b(text, digest_size=8).hexdigest())


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, default=repr)


def _unique(rows: Sequence[Row], source: str) -> tuple[list[Row], int]:
    first: dict[PromptId, Row] = {}
    copies: dict[PromptId, int] = {}
    result: list[Row] = []
    for row in rows:
        original = first.setdefault(row.id, row)
        if original is row:
            result.append(row)
            continue
        if (original.prompt, original.answer) != (row.prompt, row.answer):
            raise DataError(f"{source}: two different rows have the id '{row.id}'")
        copies[row.id] = copies.get(row.id, 1) + 1
        result.append(_renamed(row, PromptId(f"{row.id}#{copies[row.id]}")))
    if len({row.id for row in result}) < len(result):
        raise DataError(f"{source}: ids that end in #2 clash with those of repeated rows")
    return result, sum(copies.values()) - len(copies)


def _renamed(row: Row, name: PromptId) -> Row:
    return Row(
        id=name, prompt=row.prompt, answer=row.answer, domain=row.domain, columns=row.columns
    )


@dataclass(frozen=True, slots=True)
class _Exclusions:
    ids: frozenset[str]
    prompts: frozenset[str]

    def holds(self, row: Row) -> bool:
        return row.id in self.ids or _canonical(row.prompt) in self.prompts


def _exclusions(config: DataConfig) -> _Exclusions:
    assert config.exclude is not None
    update: Mapping[str, Any] = {"path": config.exclude, "exclude": None, "size": 0}
    other = config.model_copy(update=update)
    ids: set[str] = set()
    prompts: set[str] = set()
    for number, record in enumerate(read_records(other)):
        where = f"{config.exclude}, row {number}"
        column = prompt_column(record, other)
        if column is not None:
            prompts.add(_canonical(parse_prompt(value_at(record, column), where)))
        if record.get("id") is not None:
            ids.add(str(record["id"]))
        elif column is None:
            raise DataError(f"data.exclude: {where} has neither an id nor a prompt")
    return _Exclusions(frozenset(ids), frozenset(prompts))
