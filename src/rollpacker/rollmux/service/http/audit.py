"""Who asked for what: one JSON object a line, for owners."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from starlette.types import Scope

from rollpacker.rollmux.service.api.roles import Principal
from rollpacker.rollmux.service.http.middleware import BY

_REFUSED = (401, 403)


class Audit:
    """Appends to a file: what people did, and who was refused.

    Args:
        path: only its owner may read it.
    """

    def __init__(self, path: Path) -> None:
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._file = os.fdopen(handle, "a", encoding="utf-8", buffering=1)

    def note(self, scope: Scope, status: int) -> None:
        """A request that was answered: what jobs and agents ask for all the time is left out.

        The idempotency key of a line is that of the journal's entry.
        """
        access = getattr(scope.get("route"), "access", None)
        looks = scope["method"] in ("GET", "HEAD")
        if status not in _REFUSED and (looks if access is None else access.routine):
            return
        by: Principal | None = scope.get(BY)
        key = next((value for name, value in scope["headers"] if name == b"idempotency-key"), b"")
        line = {
            "wall_s": round(time.time(), 3),
            "by": None if by is None else by.name,
            "role": None if by is None else by.role,
            "from": (scope["client"] or ("",))[0],
            "method": scope["method"][:16],
            "path": scope["path"][:256],
            "status": status,
            "key": key.decode("latin-1")[:128],
        }
        self._file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()
