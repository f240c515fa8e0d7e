"""Output of jobs' programs: sent by agents, kept by the daemon in files."""

from __future__ import annotations

import os
from pathlib import Path

MOST = 64 * 2**20
"""Most bytes of an attempt's output. The node has all of them while the attempt runs."""
_PIECE = 256 * 1024


class Logs:
    """A file for each attempt. Files may be deleted at any time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def _path(self, job: str, number: int) -> Path:
        return self._folder / f"{job}.{number}.log"

    def have(self, job: str, number: int) -> int:
        path = self._path(job, number)
        return path.stat().st_size if path.exists() else 0

    def add(self, job: str, number: int, at: int, data: bytes) -> int:
        """Append data that starts at byte ``at``, except for stored bytes. Returns the stored
        bytes."""
        self._folder.mkdir(mode=0o700, exist_ok=True)
        have = self.have(job, number)
        if at <= have < MOST:
            with self._path(job, number).open("ab") as file:
                file.write(data[have - at :])
        return self.have(job, number)

    def read(self, job: str, number: int, at: int) -> tuple[int, bytes, int]:
        """A piece from ``at`` (negative: from the end), its first byte, and the stored bytes."""
        path = self._path(job, number)
        if not path.exists():
            return 0, b"", 0
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            begins = max(0, size + at) if at < 0 else min(at, size)
            file.seek(begins)
            return begins, file.read(_PIECE), size
