"""What a row is: its id, and which rows are the same."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rollpacker.core.types import PromptId
from rollpacker.data.base import DataError, Row, whole_text
from rollpacker.data.columns.messages import is_blank
from rollpacker.data.files import Record

HASHED = "hash of prompt and answer"
"""How rows without an id are named."""


def own_id(record: Mapping[str, Any]) -> Any:
    """A record's ``id``; None where it has none."""
    value = record.get("id")
    return None if is_blank(value) else value


def identity(record: Record, prompt: Any, answer: Any, where: str) -> PromptId:
    """A row's id: its own, or a hash. Raises ``DataError``."""
    own = own_id(record)
    if own is not None:
        return PromptId(whole_text(str(own), f"{where}: the id"))
    return _hashed(prompt, answer)


def distinct(rows: Sequence[Row], source: str) -> tuple[list[Row], list[str]]:
    """Rows whose ids differ, and what to say of how they are named.

    Ids that different rows share number the rows of one file, or are none: then every row is named
    by its hash. Identical rows get ``#2``, ``#3`` and so on. Raises ``DataError``.
    """
    own = sum(own_id(row.columns) is not None for row in rows)
    shared = _shared(rows)
    if shared is not None:
        rows = [replace(row, id=_hashed(row.prompt, row.answer)) for row in rows]
        notes = [f"id <- {HASHED}, as different rows have the id '{shared}'"]
    elif own:
        notes = ["id <- id" if own == len(rows) else f"id <- id, else {HASHED}"]
    else:
        notes = [f"id <- {HASHED}"]
    result, repeated = _numbered(rows, source)
    if repeated:
        notes.append(f"{repeated} identical rows renamed with #2, #3 ...")
    return result, notes


def canonical(value: Any) -> str:
    """A value as text that is the same for equal values."""
    try:
        return json.dumps(value, sort_keys=True, ensure_ascii=False, default=repr)
    except (TypeError, ValueError, RecursionError):  # keys of several types; not of JSON
        return repr(value)


def _shared(rows: Sequence[Row]) -> PromptId | None:
    """An id that different rows have."""
    first: dict[PromptId, Row] = {}
    for row in rows:
        other = first.setdefault(row.id, row)
        if other is not row and _content(other) != _content(row):
            return row.id
    return None


def _content(row: Row) -> str:
    return _text_of(row.prompt, row.answer)


def _numbered(rows: Sequence[Row], source: str) -> tuple[list[Row], int]:
    copies: dict[PromptId, int] = {}
    result: list[Row] = []
    for row in rows:
        copies[row.id] = number = copies.get(row.id, 0) + 1
        result.append(row if number == 1 else replace(row, id=PromptId(f"{row.id}#{number}")))
    if len({row.id for row in result}) < len(result):
        raise DataError(f"{source}: ids that end in #2 clash with those of repeated rows")
    return result, len(rows) - len(copies)


def _hashed(prompt: Any, answer: Any) -> PromptId:
    data = _text_of(prompt, answer).encode(errors="surrogatepass")
    return PromptId(hashlib.blake2b(data, digest_size=8).hexdigest())


def _text_of(prompt: Any, answer: Any) -> str:
    return f"{canonical(prompt)}\n{canonical(answer)}"
