"""What stands before the application: limits, the bearer token, one form of errors."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollpacker.rollmux.service.refused import Refused
from rollpacker.rollmux.service.roles import Principal

MAX_BODY = 64 * 1024
MAX_HEADERS = 16 * 1024
BY = "rollmux.by"
"""Where an application finds who asks, in the scope of a request."""
OPEN_PATHS = ("/", "/v1/health", "/favicon.ico")
_SAFETY = [
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


class Guard:
    """An ASGI application around another one.

    Args:
        app: gets requests whose body is whole and small, and whose sender has the token.
        who: whose token an ``Authorization`` header carries; None for nobody's.
        observe: is told of every request: method, route or "", status, seconds.
        audit: is told of every request: who, the sender's address, method, path, status, key.
    """

    body_s = 10.0
    """Seconds in which a body has to be there."""
    send_s = 30.0
    """Seconds in which a reader has to take each piece of an answer."""

    def __init__(
        self,
        app: ASGIApp,
        who: Callable[[bytes], Principal | None],
        observe: Callable[[str, str, int, float], None],
        audit: Callable[[Principal | None, str, str, str, int, str], None],
    ) -> None:
        self._app = app
        self._who = who
        self._observe = observe
        self._audit = audit

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
                self._note(scope, status)
                message["headers"] = [*message.get("headers", []), *_SAFETY]
            async with asyncio.timeout(self.send_s):
                await send(message)

        try:
            self._check(scope)
            async with asyncio.timeout(self.body_s):
                body = await _whole(receive)
            # Every body is JSON, whatever its sender calls it.
            headers = [each for each in scope["headers"] if each[0] != b"content-type"]
            scope["headers"] = [*headers, (b"content-type", b"application/json")]
            await self._app(scope, _replay(body, receive), sent)
        except Refused as refused:
            await _error(sent, refused)
        except TimeoutError:
            if status == 500:
                await _error(sent, Refused(408, "the request took too long to arrive"))
        except OSError:
            status = 499
            self._note(scope, status)
        finally:
            route = getattr(scope.get("route"), "path", "")
            self._observe(scope["method"], route, status, time.perf_counter() - began)

    def _note(self, scope: Scope, status: int) -> None:
        address, key = (scope["client"] or ("",))[0], _header(scope, b"idempotency-key")
        self._audit(scope.get(BY), address, scope["method"], scope["path"], status, key)

    def _check(self, scope: Scope) -> None:
        if sum(len(name) + len(value) for name, value in scope["headers"]) > MAX_HEADERS:
            raise Refused(431, f"headers: at most {MAX_HEADERS} bytes")
        path = scope["path"]
        if path in OPEN_PATHS or path.startswith("/assets/"):
            return
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        by = self._who(given[0]) if len(given) == 1 else None
        if by is None:
            raise Refused(401, "Authorization: a valid 'Bearer TOKEN' is needed")
        scope[BY] = by
        if not by.may(scope["method"], path):
            raise Refused(403, f"the token of {by} does not allow this", code="forbidden")


def _header(scope: Scope, wanted: bytes) -> str:
    found = (value for name, value in scope["headers"] if name == wanted)
    return next(found, b"").decode("latin-1")[:128]


async def _whole(receive: Receive) -> bytes:
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise OSError("the client went away")
        part = message.get("body", b"")
        size += len(part)
        if size > MAX_BODY:
            raise Refused(413, f"body: at most {MAX_BODY} bytes")
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


def _replay(body: bytes, receive: Receive) -> Receive:
    given = False

    async def again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


async def _error(send: Send, refused: Refused) -> None:
    status, body = refused.status, json.dumps(refused.body).encode()
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    headers.append((b"content-length", str(len(body)).encode()))
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
