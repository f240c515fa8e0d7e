"""``samples.parquet``: how its files are read, merged, mended and kept small.

A run writes ``samples/part-*.parquet``; its end merges them into ``samples.parquet``. Readers see
both as one table, whose files may lack columns or have more, by what was chosen to be kept. A file
that cannot be read is *damaged*: readers leave it out and say so, a run that goes on moves it
aside.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import polars as pl

from rollpacker.core.sample_columns import (
    FINAL,
    PARTS,
    REQUIRED,
    TEXTS,
    TOKEN_IDS,
    files,
)
from rollpacker.durable import sync
from rollpacker.errors import words_of

_HEAVY = (*TEXTS, *TOKEN_IDS, "messages")
_TRIES = 5

Say = Callable[[str], None]


class DamagedError(ValueError):
    """A file of the table cannot be read; the message names it."""


def scan(paths: Sequence[Path]) -> pl.LazyFrame:
    """The rows of some files as one table, none twice.

    A run that died while merging has left rows in the whole and in its parts.
    """
    frames = [pl.scan_parquet(path) for path in paths]
    if len(paths) > 1 and paths[0].name == FINAL:
        seen = frames[0].select("attempt")
        frames[1:] = [
            frame.join(seen, on="attempt", how="anti", maintain_order="left")
            for frame in frames[1:]
        ]
    return pl.concat(frames, how="diagonal_relaxed")


def check(path: Path) -> None:
    """Read a file to its end. Raises ``DamagedError``."""
    try:
        frame = pl.scan_parquet(path)
        names = frame.collect_schema().names()
        if lacking := [name for name in REQUIRED if name not in names]:
            raise DamagedError(f"{path}: lacks the columns {', '.join(lacking)}")
        every = pl.all().hash().sum()
        frame.cast({**REQUIRED}).select(every).collect(engine="streaming")
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
        reason = words_of(error)[:120]
        raise DamagedError(f"{path}: not a whole parquet file ({reason})") from None


def query(
    folder: Path, ask: Callable[[pl.LazyFrame], pl.LazyFrame], say: Say | None = None
) -> pl.DataFrame:
    """What ``ask`` makes of all rows on disk, of a run that may be going on.

    Args:
        folder: the run's.
        ask: its table has all of ``REQUIRED`` and ``TEXTS``.
        say: told of each damaged file, whose rows are left out; None raises ``DamagedError``.
    """
    for _ in range(_TRIES):
        try:
            return _collect(folder, ask, say)
        except FileNotFoundError:  # the run has merged its parts meanwhile
            continue
    return _collect(folder, ask, say)


def _collect(
    folder: Path, ask: Callable[[pl.LazyFrame], pl.LazyFrame], say: Say | None
) -> pl.DataFrame:
    paths = files(folder)
    try:
        return ask(_complete(paths)).collect(engine="streaming")
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException):
        whole = [path for path in paths if not _complain(path, say)]
        if len(whole) == len(paths):
            raise
    return ask(_complete(whole)).collect(engine="streaming")


def _complain(path: Path, say: Say | None) -> bool:
    """Whether a file is damaged."""
    try:
        check(path)
    except DamagedError as error:
        if say is None:
            raise
        say(f"{error}: its rows are missing")
        return True
    return False


def _complete(paths: Sequence[Path]) -> pl.LazyFrame:
    known = REQUIRED | TEXTS
    if not paths:
        return pl.LazyFrame(schema=known)
    frame = scan(paths)
    names = frame.collect_schema().names()
    if any(name not in names for name in REQUIRED):
        raise pl.exceptions.ColumnNotFoundError("a file lacks columns")
    lacking = {name: kind for name, kind in known.items() if name not in names}
    return frame.with_columns(pl.lit(None, kind).alias(name) for name, kind in lacking.items())


def read(folder: Path) -> pl.DataFrame:
    """All rows that are on disk. Raises ``DamagedError``."""
    return query(folder, lambda table: table)


def mend(folder: Path, say: Say) -> None:
    """Move damaged files aside, so that a run can go on without their rows."""
    for path in files(folder):
        try:
            check(path)
        except DamagedError as error:
            aside = _aside(path)
            path.replace(aside)
            say(f"WARNING {error}: moved to {aside.name}, its rows are missing in {FINAL}")


def _aside(path: Path) -> Path:
    """A name beside the table's files that is free."""
    folder = path.parent if path.name == FINAL else path.parent.parent
    name, number = f"{path.name}.damaged", 1
    while (folder / name).exists():
        number += 1
        name = f"{path.name}.damaged-{number}"
    return folder / name


def cut(folder: Path, last_step: int) -> int:
    """Drop the rows after ``last_step``; returns the number of the next part. Damaged files must
    have been moved aside (``mend``)."""
    for path in files(folder):
        frame = pl.scan_parquet(path)
        first, last = frame.select(pl.min("step"), pl.max("step").alias("last")).collect().row(0)
        if first is None or first > last_step:
            path.unlink()
        elif last > last_step:
            write(frame.filter(pl.col("step") <= last_step), path)
    parts = [int(path.stem.rpartition("-")[2]) for path in files(folder) if path.name != FINAL]
    return max(parts, default=-1) + 1


def merge(folder: Path, say: Say) -> None:
    """Put the parts into ``samples.parquet``, in the order of writing; damaged ones aside.

    Only for a run that has ended. A crash in between loses and repeats no row, since an attempt's
    id is unique. Raises ``OSError``.
    """
    if not (folder / PARTS).is_dir():
        return
    paths = files(folder)
    try:
        if paths:
            write(scan(paths), folder / FINAL)
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
        mend(folder, say)
        if files(folder) == paths:
            raise OSError(words_of(error)) from None
        merge(folder, say)
        return
    shutil.rmtree(folder / PARTS)


def forget(folder: Path, limit: int) -> int:
    """Drop the oldest texts until the files have at most ``limit`` bytes; returns what they have.

    Numbers stay, so they may be larger than the limit all the same.
    """
    paths = files(folder)
    excess = sum(path.stat().st_size for path in paths) - limit
    for path in paths:
        # Some more than needed: what is rewritten soon again costs most.
        while excess > 0 and (freed := _thin(path, excess + limit // 8)):
            excess -= freed
    return limit + excess


def _thin(path: Path, least: int) -> int:
    """Drop texts from the beginning of a file; returns the bytes that it became smaller."""
    frame = pl.scan_parquet(path)
    schema = frame.collect_schema()
    heavy = [name for name in _HEAVY if name in schema.names()]
    if not heavy:
        return 0
    before = path.stat().st_size
    weights = [
        pl.col(name).list.len() * 4 if name in TOKEN_IDS else pl.col(name).str.len_bytes()
        for name in heavy
    ]
    weight = frame.select(pl.sum_horizontal(weights)).collect(engine="streaming").to_series()
    total = int(weight.sum())
    if total == 0 or least >= before:
        write(frame.drop(heavy), path)
        return before - path.stat().st_size
    rows = int((weight.cum_sum() * (before / total) < least).sum()) + 1
    old = pl.col("row") < rows
    kept = [pl.when(~old).then(pl.col(name)).alias(name) for name in heavy]
    write(frame.with_row_index("row").with_columns(kept).drop("row"), path)
    return before - path.stat().st_size


def write(frame: pl.LazyFrame, path: Path) -> None:
    """Make ``path`` hold the rows of ``frame``, which may come from it; a crash leaves one or the
    other. Raises ``OSError`` and polars' errors."""
    temporary = path.with_name(f".tmp-{path.name}")
    try:
        frame.sink_parquet(temporary, compression="zstd")
        sync(temporary)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)
