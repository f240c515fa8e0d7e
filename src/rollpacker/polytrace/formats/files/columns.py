"""Between JSON objects and columns: what has no column travels as JSON in ``extra``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, cast

import polars as pl

from rollpacker.polytrace.schema import SAMPLES

Record = dict[str, Any]


def split(record: Mapping[str, Any], columns: Mapping[str, str]) -> tuple[Record, Record]:
    """``(values by column, the rest)`` of a record; ``columns`` maps its keys to columns.

    An explicit null stays in the rest: a column cannot tell it from a missing key.
    """
    held = {column: record.get(key) for key, column in columns.items()}
    rest = {key: value for key, value in record.items() if key not in columns or value is None}
    return held, rest


def join(held: Mapping[str, Any], columns: Mapping[str, str], rest: Mapping[str, Any]) -> Record:
    """The inverse of ``split``."""
    known = {key: held[column] for key, column in columns.items() if held.get(column) is not None}
    return {**known, **{key: value for key, value in rest.items() if key not in known}}


def pack(source: str, rest: Mapping[str, Any]) -> str:
    """The ``extra`` of a response that a ``source`` format described."""
    return json.dumps({source: rest}, separators=(",", ":"))


def unpack(extra: str | None, source: str) -> Record | None:
    """What ``pack`` packed; None where the response comes from another format."""
    if not extra:
        return None
    found: object = json.loads(extra).get(source)
    return cast(Record, found) if isinstance(found, dict) else None


def samples(rows: Iterable[Mapping[str, Any]]) -> pl.DataFrame:
    """Rows as the table ``SAMPLES``; missing keys are null."""
    return table(rows, SAMPLES)


def table(rows: Iterable[Mapping[str, Any]], schema: dict[str, pl.DataType]) -> pl.DataFrame:
    """The same for any of a trace's tables."""
    given = list(rows)
    return pl.DataFrame({name: [row.get(name) for row in given] for name in schema}, schema=schema)
