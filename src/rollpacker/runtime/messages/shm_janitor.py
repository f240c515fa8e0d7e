"""What a run's processes keep in shared memory, and its removal when they were killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
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
        self.name, self._lock = _claimed()
        self.folder = Path(tempfile.gettempdir()) / self.name
        self.folder.mkdir(mode=0o700)

    def remove(self) -> None:
        """Nobody needs them; may be called again."""
        clear(self.name)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _claimed() -> tuple[str, int | None]:
    """A name that nobody has, and the lock that says so; nothing else may be under it before.

    Between its making and its locking the lock belongs to nobody: a run that starts at the same
    moment removes it, and the name is given up.
    """
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
