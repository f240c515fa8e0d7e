"""What a run's processes keep in shared memory, and its removal when they were killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from glob import escape
from pathlib import Path

MEMORY = Path("/dev/shm")
_PREFIX = "rollpacker-"
_LOCK = "-lock"


class Belongings:
    """A folder for a run's meetings, and a name for all that it keeps in shared memory.

    A lock that ends with the driver says that the name is in use, so that the next run removes
    what one that was killed with all its workers has left: a copy of the model, perhaps.
    """

    def __init__(self) -> None:
        clear_dead()
        self.folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
        self.name = self.folder.name
        self._lock: int | None = None
        if os.access(MEMORY, os.W_OK):
            path = MEMORY / f"{self.name}{_LOCK}"
            self._lock = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX)

    def remove(self) -> None:
        """Nobody needs them; may be called again."""
        clear(self.name)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def clear(name: str) -> None:
    """Remove what there is under such names, in the temporary folder too, where what does not fit
    into shared memory is."""
    temporary = Path(tempfile.gettempdir())
    shutil.rmtree(temporary / name, ignore_errors=True)
    for folder in (MEMORY, temporary):
        for left in folder.glob(f"{escape(name)}*"):
            with contextlib.suppress(OSError):
                left.unlink()


def clear_dead() -> None:
    """Remove what runs have left whose driver and workers were killed at once."""
    for path in MEMORY.glob(f"{_PREFIX}*{_LOCK}"):
        with contextlib.suppress(OSError):
            lock = os.open(path, os.O_RDWR)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                clear(path.name.removesuffix(_LOCK))
            finally:
                os.close(lock)
