"""The records of a log's file, whatever holds them: lines, a JSON array, a table."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import polars as pl
from polars.exceptions import PolarsError

from rollpacker.errors import first_line
from rollpacker.polytrace.formats.files import opened
from rollpacker.polytrace.formats.files.lines import Problem, Record, parsed, shown, silent
from rollpacker.polytrace.formats.files.opened import TornError, bare
from rollpacker.polytrace.formats.files.reading import Reading

_ROWS_AT_ONCE = 256
_LOOKED_AT = 5
_GAP = " \t\r\n,"
_DECODER = json.JSONDecoder()


def entries(path: Path, reading: Reading) -> Iterator[tuple[int, Record]]:
    """Each record with its line (of a table, its row).

    ``reading`` is told of wrong ones, and of what is left out. Raises ``OSError``.
    """
    if bare(path).endswith(".parquet"):
        yield from _rows(path, reading)
        return
    try:
        start = next((part.lstrip()[:1] for part in opened.blocks(path) if part.strip()), b"")
    except TornError as error:
        reading.leave(Problem(path, 0, str(error)))
        return
    if not start:
        reading.leave(Problem(path, 0, "empty"))
    elif start == b"[":
        yield from _elements(path, reading)
    elif bare(path).endswith(".json"):
        yield from _document(path, reading)
    else:
        for number, raw in _numbered(path, reading):
            yield from _line(path, number, raw, reading)


def beginning(path: Path) -> tuple[list[Record], str]:
    """The first records of a file that is no table, and what is wrong where there are none.

    Raises ``OSError``.
    """
    found: list[Record] = []
    problems: list[Problem] = []
    reading = Reading(task="", note=silent, bad=problems.append, left=problems.append)
    for _, record in entries(path, reading):
        found.append(record)
        if len(found) == _LOOKED_AT:
            break
    return found, "" if found or not problems else problems[0].text


def _numbered(path: Path, reading: Reading) -> Iterator[tuple[int, bytes]]:
    """Lines; says where a packed file ends too early."""
    number = 0
    try:
        for raw in opened.lines(path, reading.tick):
            number += 1
            if raw.strip():
                yield number, raw
    except TornError as error:
        reading.leave(Problem(path, number + 1, str(error)))


def _line(path: Path, number: int, raw: bytes, reading: Reading) -> Iterator[tuple[int, Record]]:
    try:
        record = parsed(raw)
    except ValueError as error:
        torn = not raw.endswith(b"\n")
        (reading.leave if torn else reading.bad)(Problem(path, number, str(error)))
        return
    yield number, record


def _document(path: Path, reading: Reading) -> Iterator[tuple[int, Record]]:
    """One JSON object: a table of wandb's, or a record; else lines in spite of the name."""
    given = _numbered(path, reading)
    number, head = next(given, (0, b""))
    try:
        record = parsed(head)
    except ValueError:
        try:
            record = parsed(head + b"".join(raw for _, raw in given))
        except ValueError as error:
            reading.leave(Problem(path, number, str(error)))
            return
    yield from _of_table(path, record, reading) if is_table(record) else [(number, record)]
    for number, raw in given:
        yield from _line(path, number, raw, reading)


def is_table(record: Record) -> bool:
    """Whether it is a table as wandb writes it."""
    return isinstance(record.get("columns"), list) and isinstance(record.get("data"), list)


def _of_table(path: Path, record: Record, reading: Reading) -> Iterator[tuple[int, Record]]:
    names = [str(name) for name in record["columns"]]
    for number, row in enumerate(cast(list[Any], record["data"]), start=1):
        if isinstance(row, list) and len(cast(list[Any], row)) == len(names):
            yield number, dict(zip(names, cast(list[Any], row), strict=True))
        else:
            reading.bad(Problem(path, 0, f"row {number}: expected a list of {len(names)} values"))


def _elements(path: Path, reading: Reading) -> Iterator[tuple[int, Record]]:
    """Of a JSON array, each with the line in which it begins; the file is in memory as a whole."""
    text, place, number = _whole(path, reading).lstrip()[1:], 0, 1
    while True:
        begin = _after_gap(text, place)
        number += text.count("\n", place, begin)
        if text.startswith("]", begin):
            return
        try:
            value, place = _DECODER.raw_decode(text, begin)
        except (ValueError, RecursionError) as error:
            if text.rstrip().endswith("]"):
                reading.bad(Problem(path, number, f"not JSON in this record or behind it: {error}"))
            else:
                reading.leave(Problem(path, number, "the file ends within this record"))
            return
        if isinstance(value, dict):
            yield number, cast(Record, value)
        else:
            reading.bad(Problem(path, number, f"expected a JSON object, got {shown(value)}"))
        number += text.count("\n", begin, place)


def _after_gap(text: str, place: int) -> int:
    while place < len(text) and text[place] in _GAP:
        place += 1
    return place


def _whole(path: Path, reading: Reading) -> str:
    """As much text of a file as can be read."""
    blocks: list[bytes] = []
    try:
        blocks.extend(opened.blocks(path, reading.tick))
    except TornError as error:
        reading.leave(Problem(path, 0, str(error)))
    try:
        return b"".join(blocks).decode()
    except UnicodeDecodeError as error:
        reading.bad(Problem(path, 0, "not UTF-8 text"))
        return b"".join(blocks)[: error.start].decode()


def _rows(path: Path, reading: Reading) -> Iterator[tuple[int, Record]]:
    """Of a parquet file, few in memory at once; nested values as lists and dicts."""
    number = 0
    try:
        for batch in pl.scan_parquet(path).collect_batches(chunk_size=_ROWS_AT_ONCE):
            for row in batch.iter_rows(named=True):
                number += 1
                yield number, row
    except (PolarsError, OSError) as error:
        reading.leave(Problem(path, 0, f"not a parquet file ({first_line(error)})"))
        return
    reading.tick(path.stat().st_size)
