"""Who asked for what, for the daemon's owners."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rollpacker.rollmux.service.api.roles import Principal

_log = logging.getLogger(__name__)
Scope = MutableMapping[str, Any]
Note = Callable[[Scope, int], None]
BY: Final = "rollmux.by"
"""Where the scope of a request says who asks; None for a stranger."""
_REFUSED: Final = (401, 403)
_MOST, _WINDOW_S = 20, 60.0
"""Refused requests of one sender that are written in so many seconds; the others are counted."""


@dataclass(slots=True)
class _Refusals:
    """Of one sender, since a time."""

    since: float
    count: int = 0


class Audit:
    """One JSON object a line: what people did, and who was refused.

    Strangers may be refused as often as they like: of each window only the first ones are written,
    and one line that says how many there were.

    Args:
        path: only its owner may read it.
    """

    def __init__(self, path: Path) -> None:
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._file = os.fdopen(handle, "ab", buffering=0)
        self._refusals: dict[Principal | None, _Refusals] = {}
        self._failing_until = 0.0

    def note(self, scope: Scope, status: int) -> None:
        """A request that was answered: what jobs and agents ask for all the time is left out.

        The idempotency key of a line is that of the journal's entry.
        """
        route, by = scope.get("route"), scope.get(BY)
        refused = status in _REFUSED
        quiet = scope["method"] in ("GET", "HEAD") if route is None else not route.audited
        if (quiet and not refused) or (refused and not self._is_sampled(by)):
            return
        key = next((value for name, value in scope["headers"] if name == b"idempotency-key"), b"")
        self._write(
            {
                "wall_s": round(time.time(), 3),
                **_who(by),
                "from": (scope["client"] or ("",))[0],
                "method": scope["method"][:16],
                "path": scope["path"][:256],
                "status": status,
                "key": key.decode("latin-1")[:128],
            }
        )

    def _is_sampled(self, by: Principal | None) -> bool:
        now = time.monotonic()
        found = self._refusals.get(by)
        if found is None or now - found.since >= _WINDOW_S:
            self._sum_up(by)
            found = self._refusals[by] = _Refusals(now)
        found.count += 1
        return found.count <= _MOST

    def _sum_up(self, by: Principal | None) -> None:
        found = self._refusals.pop(by, None)
        if found is None or found.count <= _MOST:
            return
        seconds = round(time.monotonic() - found.since)
        left_out = {"refused": found.count, "in_s": seconds, "not_written": found.count - _MOST}
        self._write({"wall_s": round(time.time(), 3), **_who(by), **left_out})

    def _write(self, line: dict[str, Any]) -> None:
        """Add a line; where the disk fails, the daemon's log says so once in a window."""
        try:
            self._file.write(json.dumps(line).encode() + b"\n")
        except OSError as error:
            if time.monotonic() >= self._failing_until:
                self._failing_until = time.monotonic() + _WINDOW_S
                _log.error("requests are not written into the audit log: %s", error)

    def close(self) -> None:
        """Let go of the file."""
        for by in list(self._refusals):
            self._sum_up(by)
        self._file.close()


def _who(by: Principal | None) -> dict[str, str | None]:
    return {"by": None if by is None else by.name, "role": None if by is None else by.role}
