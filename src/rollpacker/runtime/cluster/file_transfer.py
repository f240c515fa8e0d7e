"""Folders from node to node, where they share no disk: a checkpoint, to the driver and from it.

Over a connection of its own, which a gate has let in; both sides wait.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

from rollpacker.runtime.ipc.wire import Wire

_PIECE = 1 << 22
"""Bytes that are in memory at a time."""


def give(end: socket.socket, folder: Path) -> None:
    """Send all files below ``folder``. Raises ``OSError``."""
    wire = Wire(end)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    wire.send([(path.relative_to(folder).as_posix(), path.stat().st_size) for path in files])
    for path in files:
        with path.open("rb") as file:
            end.sendfile(file)


def take(end: socket.socket, folder: Path) -> None:
    """Put what ``give`` sends below ``folder``, beside what is there.

    Raises ``OSError``, ``EOFError`` when the other side ends before, ``ValueError`` for a name that
    leads elsewhere.
    """
    for name, size in Wire(end).recv():
        path = folder / name
        if not path.resolve().is_relative_to(folder.resolve()):
            raise ValueError(f"{name} is not below {folder}")
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            _fill(end, file.fileno(), size)


def _fill(end: socket.socket, file: int, size: int) -> None:
    piece = memoryview(bytearray(min(_PIECE, size)))
    while size:
        count = end.recv_into(piece[:size])
        if not count:
            raise EOFError
        size -= count
        left = piece[:count]
        while left:
            left = left[os.write(file, left) :]
