"""What the programs of jobs print: agents send it, the daemon keeps it in files."""

from __future__ import annotations

import os
from pathlib import Path

MOST = 64 * 2**20
"""Bytes of an attempt that are kept here; its node has all of them while it runs."""
_PIECE = 256 * 1024


class Logs:
    """A file for each attempt.

    Args:
        folder: made where it is missing; what is in it may be deleted at any time.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def _path(self, job: str, number: int) -> Path:
        return self._folder / f"{job}.{number}.log"

    def have(self, job: str, number: int) -> int:
        """Bytes of an attempt."""
        path = self._path(job, number)
        return path.stat().st_size if path.exists() else 0

    def add(self, job: str, number: int, at: int, data: bytes) -> int:
        """Put what starts at byte ``at`` behind what is there, unless it is there already; how
        many bytes there are then."""
        self._folder.mkdir(mode=0o700, exist_ok=True)
        have = self.have(job, number)
        if at <= have < MOST:
            with self._path(job, number).open("ab") as file:
                file.write(data[have - at :])
        return self.have(job, number)

    def read(self, job: str, number: int, at: int) -> tuple[int, bytes, int]:
        """A piece from byte ``at`` on, where it begins, and how many bytes there are; a negative
        ``at`` counts from the end."""
        path = self._path(job, number)
        if not path.exists():
            return 0, b"", 0
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            begins = max(0, size + at) if at < 0 else min(at, size)
            file.seek(begins)
            return begins, file.read(_PIECE), size
