"""Weights from a replica to the engines of its machine: all map one file, in ``/dev/shm`` if there
is room. A process that dies leaves nothing locked."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from rollpacker.checkpoint_names import Layout


MEMORY = Path("/dev/shm")
_PREFIX = "rollpacker-"
_LOCK = "-lock"


class SharedMemoryOwner:
    """A folder for a run's meetings, and a name for all that it keeps in shared memory. The
    driver's lock marks the name as used, so the next run removes the files of a killed one."""

    def __init__(self) -> None:
        clear_dead()
        self.name, self._lock = _claimed()
        self.folder = Path(tempfile.gettempdir()) / self.name
        self.folder.mkdir(mode=0o700)

    def remove(self) -> None:
        clear(self.name)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _claimed() -> tuple[str, int | None]:
    """A new name and its lock. If another starting run removes the unlocked file, try again."""
    if not os.access(MEMORY, os.W_OK):
        return _new_name(), None
    while True:
        name = _new_name()
        path = MEMORY / f"{name}{_LOCK}"
        lock = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.exists():
            return name, lock
        os.close(lock)


def _new_name() -> str:
    return f"{_PREFIX}{secrets.token_hex(4)}"


def clear(name: str) -> None:
    """Remove the files of a name, also those in the temporary folder."""
    temporary = Path(tempfile.gettempdir())
    shutil.rmtree(temporary / name, ignore_errors=True)
    for folder in (MEMORY, temporary):
        for left in folder.glob(f"{escape(name)}*"):
            with contextlib.suppress(OSError):
                left.unlink()


def clear_dead() -> None:
    """Remove the files of runs whose driver and workers were killed at once."""
    for path in MEMORY.glob(f"{_PREFIX}*{_LOCK}"):
        with contextlib.suppress(OSError):
            lock = os.open(path, os.O_RDWR)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                clear(path.name.removesuffix(_LOCK))
            finally:
                os.close(lock)


_ALIGNED = 64


@dataclass(frozen=True, slots=True)
class SharedWeights:
    """Weights by the checkpoint's names, in the file ``path`` of ``size`` bytes. It may be written
    only while no engine reads."""

    path: Path
    size: int

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        import torch

        with self.path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
        data = mapped(self.path)
        for name, (dtype, shape, start, stop) in header.items():
            yield name, data[start:stop].view(getattr(torch, dtype)).view(shape)

    def remove(self) -> None:
        """Remove the file. Engines that have mapped it can still read."""
        self.path.unlink(missing_ok=True)


class WeightsOut:
    """Writes weights for engines of this machine, again and again to the file ``name``. Raises
    ``ValueError`` if there is no room for a copy of the model."""

    def __init__(self, layout: Layout, name: str) -> None:
        self._places: dict[str, tuple[int, int]] = {}
        header: dict[str, tuple[str, list[int], int, int]] = {}
        # The header's size moves the data after it, so its numbers are padded to a fixed width.
        room = 8 + sum(len(each) + 8 * len(shape) + 96 for each, (_, shape) in layout.items())
        end = -(-room // _ALIGNED) * _ALIGNED
        for weight, (dtype, shape) in layout.items():
            start, stop = end, end + dtype.itemsize * shape.numel()
            header[weight] = str(dtype).removeprefix("torch."), list(shape), start, stop
            self._places[weight] = start, stop
            end = -(-stop // _ALIGNED) * _ALIGNED
        text = json.dumps(header).encode()
        assert 8 + len(text) <= room, "the header outgrew its room"
        self.shared = SharedWeights(reserved(end, name), end)
        with self.shared.path.open("r+b") as file:
            file.write(len(text).to_bytes(8, "little") + text)
        self._data = mapped(self.shared.path)

    def write(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, weight in weights:
            start, stop = self._places[name]
            place = self._data[start:stop].view(weight.dtype).view(weight.shape)
            place.copy_(weight.detach())


def mapped(path: Path) -> torch.Tensor:
    """A file's bytes, shape (size,), in memory that all mapping processes share."""
    import torch

    size = path.stat().st_size
    return torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)


def rooms() -> list[tuple[Path, int]]:
    """Folders for a copy in the order of preference, and their free bytes."""
    found = [(folder, os.statvfs(folder)) for folder in _folders()]
    return [(folder, free.f_bavail * free.f_frsize) for folder, free in found]


def _folders() -> list[Path]:
    memory = [MEMORY] if os.access(MEMORY, os.W_OK) else []
    return [*memory, Path(tempfile.gettempdir())]


def reserved(size: int, name: str) -> Path:
    """Create a file with allocated blocks, as a missing block would crash a process later. A file
    of that name and size is reused. Raises ``ValueError`` if there is no room."""
    for folder in _folders():
        path = folder / name
        try:
            _allocate(path, size)
        except OSError:
            with contextlib.suppress(OSError):
                path.unlink()
            continue
        return path
    raise ValueError(
        f"no room for a copy of the weights ({size / 1e9:.1f} GB) in {MEMORY} or "
        f"{tempfile.gettempdir()}: engines in separate processes read the copy from there"
    )


def _allocate(path: Path, size: int) -> None:
    number = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        if os.fstat(number).st_size == size:
            return
        os.truncate(number, 0)
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(number, 0, size)
        else:
            os.truncate(number, size)
    finally:
        os.close(number)
