"""One run at a time in a folder."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType


class RunLock:
    """An exclusive lock on a run's folder, held until ``release`` or the end of the process.

    The kernel drops it when the process dies, and forked children do not keep it.

    Args:
        waits: called with a message if another process runs there, whose end is then awaited. None
            raises. A managed run needs it: an earlier process on a node that was cut off is frozen,
            and killed within an hour.

    Raises:
        ValueError: another process runs there. The message has its pid.
    """

    def __init__(self, folder: Path, waits: Callable[[str], None] | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._handle = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(self._handle, 32, 0).decode(errors="replace").strip() or "unknown"
            problem = f"{folder}: another run (pid {owner}) is writing here"
            if waits is None:
                self._close()
                raise ValueError(f"{problem}: stop it, or change 'output'") from None
            waits(f"{problem}, waiting for its end")
            fcntl.flock(self._handle, fcntl.LOCK_EX)
        os.ftruncate(self._handle, 0)
        os.pwrite(self._handle, f"{os.getpid()}\n".encode(), 0)
        os.register_at_fork(after_in_child=self._close)

    def release(self) -> None:
        """Let the next run start. It may be called twice."""
        if self._handle >= 0:
            os.ftruncate(self._handle, 0)
        self._close()

    def _close(self) -> None:
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)

    def __enter__(self) -> RunLock:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()
