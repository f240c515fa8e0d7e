"""Parquet files of other shapes than the native one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import polars as pl
from polars.exceptions import PolarsError

from rollpacker.errors import first_line
from rollpacker.polytrace.formats.files.lines import MOST
from rollpacker.polytrace.schema import TraceError


def read_table(
    path: Path, needed: Sequence[str], *, only: bool = False, also: Sequence[str] = ()
) -> pl.DataFrame:
    """A parquet file that has at least the ``needed`` columns; ``only`` leaves the others unread,
    but for those of ``also`` that are there.

    Raises ``TraceError``.
    """
    try:
        table = pl.scan_parquet(path)
        names = table.collect_schema().names()
        for name in needed:
            if name not in names:
                raise TraceError(f"{path}: column {name} is missing")
        wanted = [*needed, *(name for name in also if name in names)]
        return (table.select(wanted) if only else table).collect()
    except PolarsError as error:
        raise TraceError(f"{path}: cannot be read as parquet ({first_line(error)})") from error


def whole_numbers(path: Path, frame: pl.DataFrame, names: Iterable[str]) -> None:
    """Raise ``TraceError`` unless these columns hold counts: whole, 0 or more, not null."""
    for name in names:
        column = frame[name]
        if not column.dtype.is_integer():
            raise TraceError(f"{path}: column {name}: expected whole numbers, got {column.dtype}")
        bad = (column.is_null() | (column < 0) | (column > MOST)).arg_true()
        if bad.len():
            row = int(bad[0])
            raise TraceError(
                f"{path}, row {row + 1}: {name}: expected 0 to {MOST}, got {column[row]}"
            )
