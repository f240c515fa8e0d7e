"""What stands before the application: limits, whose token a request carries, one form of errors."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable
from typing import Any, Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollpacker.rollmux.service.api.refused import Refused
from rollpacker.rollmux.service.api.roles import Principal

_log = logging.getLogger(__name__)
MAX_HEADERS = 16 * 1024
BY = "rollmux.by"
"""Where an application finds who asks, in the scope of a request; None for a stranger."""
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
