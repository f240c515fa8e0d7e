"""Who an agent is: by this the daemon tells two of one node name apart.

One that starts again is the same as before, so it goes on at once. Whoever starts programs is who
its folder says, and has the folder to itself; whoever starts none is the machine since its boot.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
from pathlib import Path

from rollpacker.rollmux.service.state.clock import boot_id

_FILE = "agent"
_FORM = re.compile(r"[0-9a-f]{32}")


def identity(programs: Path | None) -> str:
    """Of the agent that this process is, with its folder of programs."""
    return of_machine() if programs is None else FolderIdentity(programs).name


def of_machine() -> str:
    """Until its next boot."""
    return boot_id().replace("-", "") or secrets.token_hex(16)


class FolderIdentity:
    """Of the agent that has a folder of programs, for the life of this process.

    Raises ``ValueError`` where another agent has it.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._handle = os.open(folder / _FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._handle)
            if not isinstance(error, BlockingIOError):
                raise ValueError(f"--programs {folder}: it cannot be locked: {error}") from error
            raise ValueError(
                f"--programs {folder}: another agent has this folder; stop it, or name another one"
            ) from error
        self.name = self._read() or self._written()

    def _read(self) -> str:
        found = os.pread(self._handle, 64, 0).decode("ascii", "replace").strip()
        return found if _FORM.fullmatch(found) else ""

    def _written(self) -> str:
        made = secrets.token_hex(16)
        os.ftruncate(self._handle, 0)
        os.pwrite(self._handle, made.encode() + b"\n", 0)
        os.fsync(self._handle)
        return made

    def close(self) -> None:
        """Let another agent have the folder."""
        os.close(self._handle)
