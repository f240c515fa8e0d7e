"""Writes that a crash leaves either complete or absent."""

from __future__ import annotations

import errno
import json
import os
from collections import deque
from pathlib import Path


def sync(path: Path) -> None:
    """Flush a file's bytes, or a folder's entries, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_file(path: Path, data: bytes, *, mode: int = 0o666) -> None:
    """Write and flush a file; a crash may leave it torn. Raises ``OSError``."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    with open(os.open(path, flags, mode), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, data: bytes, *, mode: int = 0o666) -> None:
    """Make ``path`` hold ``data``, or, after a crash or ``OSError``, what it held before."""
    temporary = path.with_name(f".tmp-{path.name}")
    try:
        write_file(temporary, data, mode=mode)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def cut_jsonl(path: Path, last_step: int) -> None:
    """Drop the lines of later steps, and torn ones, that a crash has left."""
    if not path.exists():
        return
    kept: list[bytes] = []
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and row.get("step", 0) <= last_step:
            kept.append(line)
    replace_file(path, b"".join(kept))


class AppendFile:
    """Appends whole records: one that does not fit is cut off again and tried with the next."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)
        self._good = self._file.seek(0, os.SEEK_END)
        self._pending: deque[bytes] = deque()

    def write(self, record: bytes) -> None:
        """Write a record behind those that failed before it. Raises ``OSError``; none is lost."""
        self._pending.append(record)
        while self._pending:
            try:
                written = self._file.write(self._pending[0])
                if written != len(self._pending[0]):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                self._file.truncate(self._good)
                raise
            self._good += written
            self._pending.popleft()

    def close(self) -> None:
        """Close the file; records that never fitted are given up."""
        self._file.close()


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_PROBE = 1 << 20


def disk_full(error: BaseException, folder: Path | None = None) -> bool:
    """Whether an error means that no space is left.

    Native writers only say so in words, or not at all (torch's complains of a position in the
    file); with ``folder`` it is then tried whether a megabyte can be written there.
    """
    if isinstance(error, OSError) and error.errno in _FULL:
        return True
    text = str(error).lower()
    if any(words in text for words in ("no space left", "disk quota", "file too large")):
        return True
    return folder is not None and _has_no_room(folder)


def _has_no_room(folder: Path) -> bool:
    probe = folder / ".tmp-probe"
    try:
        write_file(probe, b"\0" * _PROBE)
    except OSError as error:
        return error.errno in _FULL
    finally:
        probe.unlink(missing_ok=True)
    return False
