"""What stands before the application: limits, whose token a request carries, one form of errors,
and who asked for what."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollpacker.rollmux.service.api.refused import Refused
from rollpacker.rollmux.service.api.roles import BY, Principal

_log = logging.getLogger(__name__)
MAX_HEADERS = 16 * 1024
KNOWN = "rollmux.known"
"""Where a connection says how it is told whose it is."""
HANG_UP = "rollmux.hang_up"
"""Where it says how it ends at once, with what nobody has read."""
Observe = Callable[[str, str, int, float], None]
"""Is told of a request: method, route or "", status, seconds."""
Note = Callable[[Scope, int], None]
"""Is told of a request and its status, before its sender can have read it."""
_SAFETY: Final = [
    (b"x-content-type-options", b"nosniff"),
    (b"cache-control", b"no-store"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        b"img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
]
_LAST: Final = (b"connection", b"close")
"""A stranger's connection is not kept."""
_REFUSED: Final = (401, 403)


class AccessGuard:
    """An ASGI application around another one, whose routes decide by who asks.

    Args:
        who: whose token an ``Authorization`` header carries; None for nobody's.
    """

    send_s = 30.0
    """Seconds in which a reader has to take each piece of an answer."""

    def __init__(
        self, app: ASGIApp, who: Callable[[bytes], Principal | None], observe: Observe, note: Note
    ) -> None:
        self._app = app
        self._who = who
        self._observe = observe
        self._note = note

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close"})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()
        status = 500

        async def sent(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                # Before anybody can have read the answer.
                self._told(self._note, scope, status)
                message["headers"] = [*message.get("headers", []), *_SAFETY]
                if scope.get(BY) is None:
                    message["headers"].append(_LAST)
            try:
                async with asyncio.timeout(self.send_s):
                    await send(message)
            except TimeoutError:
                scope.get(HANG_UP, _nothing)()
                raise

        try:
            self._look(scope)
            await self._app(scope, receive, sent)
        except Refused as refused:
            await _error(sent, refused)
        except OSError:
            status = 499
            self._told(self._note, scope, status)
        finally:
            route = getattr(scope.get("route"), "path", "")
            seconds = time.perf_counter() - began
            self._told(self._observe, scope["method"], route, status, seconds)

    def _told(self, tell: Callable[..., None], *what: Any) -> None:
        """Whoever keeps count holds no answer up: a disk may be full."""
        try:
            tell(*what)
        except Exception:
            _log.exception("a request is not written down")

    def _look(self, scope: Scope) -> None:
        """Who it is; also for the connection, which is a stranger's until then."""
        if sum(len(name) + len(value) for name, value in scope["headers"]) > MAX_HEADERS:
            raise Refused(431, f"headers: at most {MAX_HEADERS} bytes")
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        by = scope[BY] = self._who(given[0]) if len(given) == 1 else None
        if by is not None and KNOWN in scope:
            scope[KNOWN](by)


def _nothing() -> None:
    """Of a connection that does not say."""


async def _error(send: Send, refused: Refused) -> None:
    body = json.dumps(refused.body).encode()
    headers = [(b"content-type", b"application/json"), _LAST]
    headers.append((b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": refused.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class Audit:
    """Who asked for what, one JSON object a line, for owners: what people did, and who was refused.

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
