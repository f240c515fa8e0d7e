"""Folders from node to node, where they share no disk: a checkpoint, to the driver and from it.

Over a connection of its own, which a gate has let in; both sides wait. Commands that name a folder
of the driver's are put into the words of nodes that may not see its disk.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

from rollpacker.runtime.cluster.nodes import Nodes
from rollpacker.runtime.ipc.wire import Wire
from rollpacker.runtime.messages import messages as msg

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


Kept = msg.Save | msg.Load


async def for_nodes(machines: Nodes, command: Kept, nodes: Collection[int]) -> dict[int, Kept]:
    """The command for each of these nodes, with the folder as it is called there.

    Raises ``OSError`` where a folder cannot be brought to a node.
    """
    folder, way = Path(command.folder), machines.place
    if isinstance(command, msg.Load):
        way = machines.bring
    return {node: replace(command, folder=str(await way(node, folder))) for node in nodes}


async def gather_in(machines: Nodes, command: Kept, given: Mapping[int, Kept]) -> None:
    """What was saved on other nodes' disks comes to the driver's. Raises ``OSError``."""
    if isinstance(command, msg.Save):
        for node, there in given.items():
            if there.folder != command.folder:
                await machines.collect(node, Path(there.folder), Path(command.folder))
