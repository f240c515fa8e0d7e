"""Rows of any source in the canonical form, and one line that says how they were read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rollpacker.config import DataConfig
from rollpacker.core.types import PromptId
from rollpacker.data.base import DataError, Row, whole_text
from rollpacker.data.files import Record
from rollpacker.data.messages import (
    MissingError,
    check_text_only,
    parse_prompt,
    parse_template_kwargs,
    parse_tools,
)
from rollpacker.data.read import read_records
from rollpacker.data.schema import OPENRLHF, Schema, columns_of, detect, prompt_column, value_at


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
    excluded = _excluded(config)
    taken = _Taken()
    for where, record in rows:
        if config.size and len(taken.rows) == config.size:
            break
        taken.add(record, schema, where, excluded)
    if taken.missing and (config.missing == "error" or not taken.rows):
        raise DataError(_missing(taken, config))
    if not taken.rows:
        raise DataError(f"data.exclude: '{config.exclude}' holds every row of '{records.name}'")
    unique, repeated = _unique(taken.rows, records.name)
    notes = [f"{records.name}: {len(unique)} rows, {schema.describe()}, {_ids(unique)}"]
    if taken.cut:
        notes.append(f"the assistant's last turn is cut from {taken.cut} prompts")
    if repeated:
        notes.append(f"{repeated} identical rows renamed with #2, #3 ...")
    if taken.dropped:
        notes.append(f"{taken.dropped} rows dropped that are in {config.exclude}")
    if taken.missing:
        notes.append(f"{len(taken.missing)} incomplete rows skipped, first {taken.missing[0]}")
    return Loaded(rows=unique, mapping="; ".join(notes))


@dataclass(slots=True)
class _Taken:
    """What was read of a source so far."""

    rows: list[Row] = field(default_factory=list[Row])
    missing: list[str] = field(default_factory=list[str])
    cut: int = 0
    dropped: int = 0

    def add(
        self, record: Record, schema: Schema, where: str, excluded: Callable[[Row], bool]
    ) -> None:
        try:
            row, cut = _row(record, schema, where)
        except MissingError as error:
            self.missing.append(str(error))
            return
        if excluded(row):
            self.dropped += 1
            return
        self.rows.append(row)
        self.cut += cut


def _missing(taken: _Taken, config: DataConfig) -> str:
    count = len(taken.missing)
    others = f" (and {count - 1} rows more)" if count > 1 else ""
    if config.missing == "skip":
        return f"data.missing: skip leaves no row: {taken.missing[0]}{others}"
    return f"{taken.missing[0]}{others}: set data.missing: skip to leave such rows out"


def _ids(rows: Sequence[Row]) -> str:
    hashed = "hash of prompt and answer"
    own = sum(row.columns.get("id") is not None for row in rows)
    if own:
        return "id <- id" if own == len(rows) else f"id <- id, else {hashed}"
    return f"id <- {hashed}"


def _row(record: Record, schema: Schema, where: str) -> tuple[Row, bool]:
    """A row, and whether its prompt ended in the reference answer."""
    check_text_only(record, where)
    value = value_at(record, schema.prompt)
    if value is None:
        raise MissingError(f"{where}: no prompt in column '{schema.prompt}'")
    prompt, gold = parse_prompt(value, where)
    answer = _answer(record, schema, gold, where)
    row = Row(
        id=_identity(record, prompt, answer, where),
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
    if answer is None and not gold:
        raise MissingError(f"{where}: no answer in column '{schema.answer}'")
    return gold if answer is None else answer


def _domain(record: Record, schema: Schema, where: str) -> str:
    domain = value_at(record, schema.domain) if schema.domain else "default"
    if domain is None and schema.name == OPENRLHF:
        return "default"
    if domain is None:
        raise MissingError(f"{where}: no domain in column '{schema.domain}' (data.domain_key)")
    return whole_text(str(domain), f"{where}: the domain")


def _identity(record: Record, prompt: Any, answer: Any, where: str) -> PromptId:
    if record.get("id") is not None:
        return PromptId(whole_text(str(record["id"]), f"{where}: the id"))
    data = _content(prompt, answer).encode(errors="surrogatepass")
    return PromptId(hashlib.blake2b(data, digest_size=8).hexdigest())


def _content(prompt: Any, answer: Any) -> str:
    return f"{canonical(prompt)}\n{canonical(answer)}"


def canonical(value: Any) -> str:
    """A value as text that is the same for equal values."""
    try:
        return json.dumps(value, sort_keys=True, ensure_ascii=False, default=repr)
    except (TypeError, ValueError, RecursionError):  # keys of several types; not of JSON
        return repr(value)


def _unique(rows: Sequence[Row], source: str) -> tuple[list[Row], int]:
    first: dict[PromptId, Row] = {}
    copies: dict[PromptId, int] = {}
    result: list[Row] = []
    for row in rows:
        original = first.setdefault(row.id, row)
        if original is row:
            result.append(row)
            continue
        if _content(original.prompt, original.answer) != _content(row.prompt, row.answer):
            raise DataError(f"{source}: two different rows have the id '{row.id}'")
        copies[row.id] = copies.get(row.id, 1) + 1
        result.append(replace(row, id=PromptId(f"{row.id}#{copies[row.id]}")))
    if len({row.id for row in result}) < len(result):
        raise DataError(f"{source}: ids that end in #2 clash with those of repeated rows")
    return result, sum(copies.values()) - len(copies)


def _excluded(config: DataConfig) -> Callable[[Row], bool]:
    """Whether a row is to be left out."""
    if not config.exclude:
        return lambda _: False
    update: Mapping[str, Any] = {"path": config.exclude, "exclude": None, "size": 0}
    other = config.model_copy(update=update)
    ids: set[str] = set()
    prompts: set[str] = set()
    rows = read_records(other).rows
    column = prompt_column(columns_of(record for _, record in rows), other)
    for where, record in rows:
        prompt = value_at(record, column) if column else None
        if prompt is not None:
            prompts.add(canonical(parse_prompt(prompt, where)[0]))
        if record.get("id") is not None:
            ids.add(str(record["id"]))
        elif prompt is None:
            raise DataError(f"data.exclude: {where} has neither an id nor a prompt")
    return lambda row: row.id in ids or canonical(row.prompt) in prompts
