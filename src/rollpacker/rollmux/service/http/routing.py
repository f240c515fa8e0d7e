"""A route of the table in FastAPI: found by its one spelling, open to whom its entry allows."""

from __future__ import annotations

import asyncio
import re
from collections import defaultdict
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final

import msgspec
from fastapi import Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from starlette.routing import Match
from starlette.types import Receive, Scope, Send

from rollpacker.core.codec import dumps_finite
from rollpacker.rollmux.service.api.access_table import IDENTIFIERS, ROUTES, Access, Spelling
from rollpacker.rollmux.service.api.refused import Refused
from rollpacker.rollmux.service.api.roles import BY, Principal

MAX_BODY = 64 * 1024
_AT_ONCE = 8
_DEPTH = 8
"""Of what stands in a body; the deepest one that is asked for has four."""
_LARGEST: Final = 2**63
_UNFIT: Final = re.compile("[\0\ud800-\udfff]")
"""What no file, no program and no answer can hold."""
_CONTROL: Final = re.compile("[\0-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
"""What moves a cursor or ends a line, too."""
_FREE: Final = "program"
"""Where texts are a user's own, of any number of lines."""
_CLOSED = {"connection": "close"}
"""Nobody reads the rest of such a request."""
_HEADERS = {
    401: {"www-authenticate": "Bearer"},
    408: _CLOSED,
    413: _CLOSED,
    503: {"retry-after": "1"},
}


def answered(status: int, body: Mapping[str, Any] | None) -> Response:
    """With a body of JSON, or None."""
    if body is None:
        return Response(status_code=status)
    # What is not finite is null, as JSON wants it.
    return Response(dumps_finite(body), status, _HEADERS.get(status), "application/json")


def looks() -> defaultdict[Principal, asyncio.Semaphore]:
    """Looks of one token take turns: those who work are not to wait for many of them, and what
    nobody reads is kept a few times only."""
    return defaultdict(lambda: asyncio.Semaphore(_AT_ONCE))


class Route(APIRoute):
    """One that is in the table; ``KeyError`` on any other.

    Who asks is looked at before a body is read, and both before anything else happens.
    """

    body_s = 10.0
    """Seconds in which a body has to be there."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **more: Any) -> None:
        super().__init__(path, endpoint, **more)
        self.name_in_table = f"{''.join(self.methods or ())} {path}"
        self.access: Access = ROUTES[self.name_in_table]
        self._spelling = Spelling(path)

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Whether it is asked for, by the bytes that were sent."""
        found = self._spelling.read(scope["raw_path"]) if scope["type"] == "http" else None
        if found is None:
            return Match.NONE, {}
        told = {"endpoint": self.endpoint, "path_params": found, "route": self}
        return Match.FULL if self._is_for(scope) else Match.PARTIAL, told

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let in whom the table allows. Raises ``Refused``."""
        if self.access.roles is not None:
            by = known(scope)
            if self._is_for(scope) and not by.is_one_of(self.access.roles):
                raise Refused(403, f"the token of {by} does not allow this", code="forbidden")
            if scope["method"] == "GET":
                async with scope["app"].state.looks[by]:
                    await super().handle(scope, receive, send)
                return
        await super().handle(scope, receive, send)

    def _is_for(self, scope: Scope) -> bool:
        return scope["method"] in (self.methods or ())

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's, with the body that was read and checked here."""
        handler = super().get_route_handler()

        async def checked(request: Request) -> Response:
            try:
                async with asyncio.timeout(self.body_s):
                    data = await _whole(request.receive)
            except TimeoutError:
                raise Refused(408, "the request took too long to arrive") from None
            return await handler(_Checked(request.scope, data))

        return checked


class _Checked(Request):
    """A request whose body is whole, and was read once.

    Every body is JSON, whatever its sender calls it.
    """

    def __init__(self, scope: Scope, data: bytes) -> None:
        headers = [each for each in scope["headers"] if each[0] != b"content-type"]
        headers.append((b"content-type", b"application/json"))
        super().__init__({**scope, "headers": headers})
        self._data, self._json = data, read_body(data) if data else {}

    async def body(self) -> bytes:
        """As it was sent."""
        return self._data

    async def json(self) -> Any:
        """As it was read."""
        return self._json


def known(scope: Scope) -> Principal:
    """Who asks. Raises ``Refused`` for a stranger."""
    by: Principal | None = scope.get(BY)
    if by is None:
        raise Refused(401, "Authorization: a valid 'Bearer TOKEN' is needed")
    return by


async def no_route(scope: Scope, _receive: Receive, _send: Send) -> None:
    """What is asked for is not there, and strangers are not told so. Raises ``Refused``."""
    known(scope)
    names = f"jobs and nodes match {IDENTIFIERS['job'][0].pattern}"
    raise Refused(404, f"path: there is none so written ({names}, numbers are plain digits)")


async def _whole(receive: Receive) -> bytes:
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Refused(499, "the client went away")
        part = message.get("body", b"")
        size += len(part)
        if size > MAX_BODY:
            raise Refused(413, f"body: at most {MAX_BODY} bytes")
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


def read_body(data: bytes) -> Any:
    """A JSON value that can be stored, sent and shown. Raises ``Refused`` on any other."""
    try:
        body = msgspec.json.decode(data)
    except RecursionError:
        raise Refused(400, f"body: nested deeper than {_DEPTH} levels") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Refused(400, f"body: no JSON: {error}") from None
    _check(body, "body", _DEPTH)
    return body


def _check(value: Any, where: str, depth: int, free: bool = False) -> None:
    match value:
        case str():
            _check_text(value, where, free)
        case bool() | None:
            pass
        case int() | float():
            # A float may be larger: msgspec lets none be infinite.
            if isinstance(value, int) and not -_LARGEST <= value < _LARGEST:
                raise Refused(400, f"{where[:64]!a}: no number of 64 bits")
        case _ if not depth:
            raise Refused(400, f"body: nested deeper than {_DEPTH} levels")
        case dict():
            found: Mapping[str, Any] = value
            for name, each in found.items():
                _check_text(name, "body, the name of a field", free=False)
                _check(each, name, depth - 1, free or name == _FREE)
        case _:
            for each in value:
                _check(each, where, depth - 1, free)


def _check_text(text: str, where: str, free: bool) -> None:
    if found := (_UNFIT if free else _CONTROL).search(text):
        raise Refused(400, f"{where[:64]!a}: may not hold the character {found[0]!a}")
