"""Who asked for what: one JSON object a line, for owners."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

from rollpacker.rollmux.service.roles import Principal

_ROUTINE = re.compile(
    r"/v1/(permits/.*|jobs/[^/]+/(permits|tail|moved|attempts/.*|gate)|.*/heartbeat)"
)
"""What jobs and agents ask for all the time; the log of events has it."""
_REFUSED = (401, 403)


class Audit:
    """Appends to a file: what people did, and who was refused.

    Args:
        path: only its owner may read it.
    """

    def __init__(self, path: Path) -> None:
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._file = os.fdopen(handle, "a", encoding="utf-8", buffering=1)

    def note(
        self, by: Principal | None, address: str, method: str, path: str, status: int, key: str
    ) -> None:
        """A request that was answered; ``by`` None had no valid token.

        Args:
            key: the idempotency key, which the journal's entry has too.
        """
        routine = method in ("GET", "HEAD") or _ROUTINE.fullmatch(path)
        if routine and status not in _REFUSED:
            return
        line = {
            "wall_s": round(time.time(), 3),
            "by": None if by is None else by.name,
            "role": None if by is None else by.role,
            "from": address,
            "method": method,
            "path": path[:256],
            "status": status,
            "key": key,
        }
        self._file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()
