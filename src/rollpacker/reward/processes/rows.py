"""Rows of many kilobytes are written to a file once; jobs name the file.

A smaller row is sent with every job. Each call gets a copy of a large row, so that a function which
changes its row changes no other response's.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import pickle
import tempfile
import weakref
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

LARGE = 1 << 16
"""Bytes from which on a row goes by a file."""
MOST = 1 << 28
"""Bytes of the files that are kept for rows which may come again."""

Row = Mapping[str, Any]


class RowFile:
    """A large row's file, which is deleted with the last job that needs it."""

    def __init__(self, row: Row, packed: bytes) -> None:
        descriptor, self.path = tempfile.mkstemp(prefix="rollpacker-row-")
        weakref.finalize(self, Path(self.path).unlink, missing_ok=True)
        self.row = row  # kept, so that no other row gets its id
        self.size = len(packed)
        with os.fdopen(descriptor, "wb") as file:
            file.write(packed)


class RowFiles:
    """The driver's files of large rows, the oldest first."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._files: dict[int, RowFile] = {}
        self._bytes = 0

    def of(self, row: Row) -> RowFile | None:
        """A row's file, if it has one."""
        return self._files.get(id(row))

    def add(self, rows: Iterable[Row]) -> bool:
        """Write the large rows among these that have no file yet; whether there are any. Raises
        what pickle raises."""
        added = False
        for row in {id(row): row for row in rows if id(row) not in self._files}.values():
            packed = pickle.dumps(row, pickle.HIGHEST_PROTOCOL)
            if LARGE <= len(packed) <= self._most:
                with contextlib.suppress(OSError):  # on a full disk it goes with its job
                    self._files[id(row)] = RowFile(row, packed)
                    self._bytes += len(packed)
                    added = True
        while self._bytes > self._most:
            self._bytes -= self._files.pop(next(iter(self._files))).size
        return added

    def forget(self) -> None:
        """Keep files for jobs that have been sent only."""
        self._files.clear()
        self._bytes = 0


def load_row(path: str) -> Row:
    """A copy of a large row."""
    return pickle.loads(_mapped(path))


@lru_cache(maxsize=64)
def _mapped(path: str) -> mmap.mmap:
    # Mapped, not read: its memory is the page cache's, which all grading processes share.
    with open(path, "rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
