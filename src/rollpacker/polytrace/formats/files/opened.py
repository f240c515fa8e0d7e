"""A log's bytes, line by line, packed or not: nothing of a file stays in memory but the line."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, cast

import polars as pl
from polars.exceptions import PolarsError

from rollpacker.errors import first_line

PACKED = (".gz", ".zst")
_GZIP = b"\x1f\x8b"
_ZSTD = b"\x28\xb5\x2f\xfd"
_BOM = b"\xef\xbb\xbf"
_BLOCK = 1 << 20
_LINES_AT_ONCE = 64

Tick = Callable[[int], None]
"""Told how many more bytes of the files, as they lie on disk, were read."""


def quiet(_: int) -> None:
    """A ``Tick`` where nobody watches."""


class TornError(ValueError):
    """A packed file ends too early, or is none; the message says which."""


def bare(path: Path) -> str:
    """The file's name without the suffix of its packing."""
    return path.stem if path.suffix in PACKED else path.name


def packing(path: Path) -> str:
    """How a file is packed, as the suffix of it: by its name, else by its first bytes. Empty for
    not at all."""
    if path.suffix in PACKED:
        return path.suffix
    with path.open("rb") as file:
        start = file.read(len(_ZSTD))
    return ".gz" if start.startswith(_GZIP) else ".zst" if start == _ZSTD else ""


def lines(path: Path, tick: Tick = quiet) -> Iterator[bytes]:
    """Each line with its end, the last one perhaps without; a byte order mark is left out.

    Raises ``OSError``, and ``TornError`` after the last line that can be read.
    """
    if packing(path) == ".zst":
        yield from _without_mark(_of_zstd(path, tick))
    else:
        yield from _without_mark(_read(path, tick, lambda file: file.readline()))


def blocks(path: Path, tick: Tick = quiet) -> Iterator[bytes]:
    """The same bytes as ``lines`` in pieces of any size, where a line may be the whole file."""
    if packing(path) == ".zst":
        yield from _without_mark(_of_zstd(path, tick))
    else:
        yield from _without_mark(_read(path, tick, lambda file: file.read(_BLOCK)))


def _without_mark(given: Iterator[bytes]) -> Iterator[bytes]:
    for number, piece in enumerate(given):
        yield piece.removeprefix(_BOM) if number == 0 else piece


def _read(path: Path, tick: Tick, take: Callable[[BinaryIO], bytes]) -> Iterator[bytes]:
    with path.open("rb") as raw:
        if packing(path) != ".gz":
            yield from _told(raw, raw, tick, take)
            return
        with gzip.open(raw) as packed:
            try:
                yield from _told(cast(BinaryIO, packed), raw, tick, take)
            except EOFError:
                raise TornError("the gzip file ends too early") from None
            except (gzip.BadGzipFile, zlib.error) as error:
                raise TornError(f"not a gzip file ({error})") from error


def _told(
    file: BinaryIO, raw: BinaryIO, tick: Tick, take: Callable[[BinaryIO], bytes]
) -> Iterator[bytes]:
    told = since = 0
    while piece := take(file):
        yield piece
        since += len(piece)
        if since >= _BLOCK:
            since, now = 0, raw.tell()
            tick(now - told)
            told = now
    tick(raw.tell() - told)


def _of_zstd(path: Path, tick: Tick) -> Iterator[bytes]:
    """Polars unpacks it: Python itself cannot before 3.14."""
    with path.open("rb") as file:
        start = file.read(len(_ZSTD))
    if start and start != _ZSTD:
        raise TornError("not a zstd file")
    try:
        for batch in pl.scan_lines(path).collect_batches(chunk_size=_LINES_AT_ONCE):
            for line in batch.to_series():
                yield line.encode() + b"\n"
    except OSError:
        raise TornError("the zstd file ends too early") from None
    except PolarsError as error:
        raise TornError(f"the zstd file cannot be read ({first_line(error)})") from error
    tick(path.stat().st_size)
