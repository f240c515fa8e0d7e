"""The daemon's ASGI application: routing, access control, parsing, answers and the audit log."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qsl

import msgspec

from rollpacker.core.codec import dumps_finite, read_record
from rollpacker.rollmux.service.api import bodies
from rollpacker.rollmux.service.api.roles import Principal, Refused
from rollpacker.rollmux.service.commands.writer import Answer, unavailable
from rollpacker.rollmux.service.http.routes import IDENTIFIERS, ROUTES, Asked, DaemonParts, Route

_log = logging.getLogger(__name__)
Scope = MutableMapping[str, Any]
Note = Callable[[Scope, int], None]
BY: Final = "rollmux.by"
"""Scope key for the sender of a request. Its value is None for a stranger."""
_REFUSED: Final = (401, 403)
_MOST, _WINDOW_S = 20, 60.0
"""Refused requests of one sender that are logged per window in seconds. Others are counted."""


class Audit:
    """The audit log: user actions and refused requests, one JSON object a line.

    Strangers can cause any number of refusals. Each window therefore has only the first ones, and a
    line with their number.
    """

    def __init__(self, path: Path) -> None:
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._file = os.fdopen(handle, "ab", buffering=0)
        self._refusals: dict[Principal | None, tuple[float, int]] = {}
        """Start of the window and number of refusals, by sender."""
        self._failing_until = 0.0

    def note(self, scope: Scope, status: int) -> None:
        """Log an answered request, except routine requests of jobs and agents."""
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
        since, count = self._refusals.get(by, (-_WINDOW_S, 0))
        if time.monotonic() - since >= _WINDOW_S:
            self._sum_up(by)
            since, count = time.monotonic(), 0
        self._refusals[by] = since, count + 1
        return count < _MOST

    def _sum_up(self, by: Principal | None) -> None:
        since, count = self._refusals.pop(by, (0.0, 0))
        if count > _MOST:
            seconds = round(time.monotonic() - since)
            left_out = {"refused": count, "in_s": seconds, "not_written": count - _MOST}
            self._write({"wall_s": round(time.time(), 3), **_who(by), **left_out})

    def _write(self, line: dict[str, Any]) -> None:
        """Add a line. If the disk fails, the daemon's log reports it once per window."""
        try:
            self._file.write(json.dumps(line).encode() + b"\n")
        except OSError as error:
            if time.monotonic() >= self._failing_until:
                self._failing_until = time.monotonic() + _WINDOW_S
                _log.error("requests cannot be written to the audit log: %s", error)

    def close(self) -> None:
        for by in list(self._refusals):
            self._sum_up(by)
        self._file.close()


def _who(by: Principal | None) -> dict[str, str | None]:
    return {"by": None if by is None else by.name, "role": None if by is None else by.role}


Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Observe = Callable[[str, str, int, float], None]
"""Called for each request with method, route or "", status and seconds."""

MAX_HEADERS = 16 * 1024
MAX_BODY = 64 * 1024
KNOWN = "rollmux.known"  # scope key for the function that tells a connection its sender
HANG_UP = "rollmux.hang_up"
"""Scope key for the function that closes a connection at once, discarding unread data."""
_AT_ONCE = 8
_GONE = 499
_DEPTH = 8
"""Deepest nesting of a body. The deepest known body has four levels."""
_LARGEST: Final = 2**63
_UNFIT: Final = re.compile("[\0\ud800-\udfff]")
"""Characters that files, programs or answers cannot hold."""
_CONTROL: Final = re.compile("[\0-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
"""The same, and control characters that move a cursor or end a line."""
_FREE: Final = "program"  # field whose texts belong to the user and may have several lines
_KEY = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
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
_HEADERS: Final = {
    401: [(b"www-authenticate", b"Bearer")],
    # The rest of such a request is not read.
    408: [_LAST],
    413: [_LAST],
    503: [(b"retry-after", b"1")],
}


class _GoneError(Exception):
    """The reader has left or reads no more."""


class App:
    """Serves the routes.

    Args:
        who: the sender by an ``Authorization`` header (None if the token is unknown).
        note: called with each request and its status, before its sender can read the answer.
    """

    body_s = 10.0
    send_s = 30.0

    def __init__(
        self,
        daemon: DaemonParts,
        who: Callable[[bytes], Principal | None],
        observe: Observe,
        note: Note,
        routes: Mapping[str, Route] = ROUTES,
    ) -> None:
        self._daemon = daemon
        self._who = who
        self._observe = observe
        self._note = note
        self._paths: dict[str, dict[str, Route]] = {}
        for name, route in routes.items():
            method, path = name.split(" ")
            self._paths.setdefault(path, {})[method] = route
        self._spellings = {path: re.compile(_spelling(path)) for path in self._paths}
        # A few reads per token at a time, so that readers neither starve writers nor pile up unread
        # answers.
        self._looks = defaultdict[Principal, asyncio.Semaphore](lambda: asyncio.Semaphore(_AT_ONCE))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await send({"type": "websocket.close"})
            return
        began = time.perf_counter()
        status = _GONE
        try:
            status = await self._serve(scope, receive, send)
        except _GoneError:
            scope.get(HANG_UP, lambda: None)()
        finally:
            route, seconds = scope.get("path_in_table", ""), time.perf_counter() - began
            self._tell(self._observe, scope["method"], route, status, seconds)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> int:
        try:
            route, found = self._admitted(scope)
        except Exception as error:
            return await self._send(scope, receive, send, _refusal(error))
        by: Principal | None = scope[BY]
        looks = route.roles is not None and scope["method"] == "GET"
        async with self._looks[by] if looks and by is not None else nullcontext():
            try:
                asked = await self._read(scope, receive, route, found)
                reply = _in_bytes(await route.act(self._daemon, asked))
            except Exception as error:
                reply = _refusal(error)
            return await self._send(scope, receive, send, reply)

    def _admitted(self, scope: Scope) -> tuple[Route, dict[str, Any]]:
        """The route and the identifiers in its path, after access control. Raises ``Refused``."""
        scope[BY] = None
        if sum(len(name) + len(value) for name, value in scope["headers"]) > MAX_HEADERS:
            raise Refused(431, f"headers: at most {MAX_HEADERS} bytes")
        given = _header(scope, b"authorization")
        by = scope[BY] = None if given is None else self._who(given)
        if by is not None and KNOWN in scope:
            scope[KNOWN](by)
        path, found = self._identifiers(scope["raw_path"].decode("latin-1"), by)
        scope["path_in_table"], methods = path, self._paths[path]
        route = scope["route"] = methods.get(scope["method"], next(iter(methods.values())))
        if route.roles is not None:
            by = _known(by)
            if scope["method"] in methods and not by.is_one_of(route.roles):
                raise Refused(403, f"the token of {by} does not allow this", code="forbidden")
        if scope["method"] not in methods:
            raise Refused(405, f"this path takes {' and '.join(methods)}; see docs/mux_api.md")
        return route, found

    def _identifiers(self, sent: str, by: Principal | None) -> tuple[str, dict[str, Any]]:
        for path, spelling in self._spellings.items():
            if match := spelling.fullmatch(sent):
                given = match.groupdict().items()
                return path, {name: IDENTIFIERS[name][1](text) for name, text in given}
        # Strangers learn nothing about paths.
        _known(by)
        names = f"jobs and nodes match {IDENTIFIERS['job'][0].pattern}"
        raise Refused(404, f"path: unknown path ({names}, numbers are plain digits)")

    async def _read(
        self, scope: Scope, receive: Receive, route: Route, found: dict[str, Any]
    ) -> Asked:
        try:
            async with asyncio.timeout(self.body_s):
                data = await _whole(receive)
        except TimeoutError:
            raise Refused(408, "the request took too long to arrive") from None
        path = (*found.values(),)
        if scope["method"] == "GET":
            pairs = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
            known = route.body.__struct_fields__
            query = {name: text for name, text in pairs if name in known}
            _check(query, "query", _DEPTH)
            return Asked(path, _record(query, route.body, strict=False), bodies.Post("", ""))
        key = _header(scope, b"idempotency-key")
        if key is None or not _KEY.fullmatch(key):
            text = "a header of 1 to 128 characters out of A-Za-z0-9._:- is needed"
            raise Refused(400, f"Idempotency-Key: {text}")
        body = read_body(data) if data else {}
        line = f"{scope['method']} {scope['path']}"
        about = {name: value for name, value in found.items() if name == route.owner}
        post = bodies.asked(key.decode(), line, body, by=scope[BY], **about)
        return Asked(path, _record(body, route.body), post)

    async def _send(self, scope: Scope, receive: Receive, send: Send, reply: Answer) -> int:
        self._tell(self._note, scope, reply.status)
        content = reply.body or b""
        assert not isinstance(content, Mapping)
        headers = [*_SAFETY, *_HEADERS.get(reply.status, ())]
        if isinstance(content, bytes):
            headers.append((b"content-length", str(len(content)).encode()))
        if content:
            headers.append((b"content-type", reply.media.encode()))
        if scope[BY] is None and _LAST not in headers:
            # Do not keep a stranger's connection.
            headers.append(_LAST)
        start = {"type": "http.response.start", "status": reply.status, "headers": headers}
        if reply.status == 204:
            headers.remove((b"content-length", b"0"))
        if isinstance(content, bytes):
            await self._pass_on(send, start)
            await self._pass_on(send, {"type": "http.response.body", "body": content})
            return reply.status
        # The whole request was received, so this ends only if the reader leaves.
        gone = asyncio.ensure_future(receive())
        try:
            await self._pass_on(send, start)
            while (piece := await asyncio.to_thread(next, content, None)) is not None:
                if gone.done():
                    raise _GoneError
                more = {"type": "http.response.body", "body": piece.encode(), "more_body": True}
                await self._pass_on(send, more)
            await self._pass_on(send, {"type": "http.response.body", "body": b""})
        finally:
            gone.cancel()
            with suppress(ValueError):  # a thread is using it, and closes it afterwards
                content.close()
        return reply.status

    async def _pass_on(self, send: Send, message: MutableMapping[str, Any]) -> None:
        try:
            async with asyncio.timeout(self.send_s):
                await send(message)
        except OSError as error:  # TimeoutError is one, too
            raise _GoneError from error

    def _tell(self, tell: Callable[..., None], *what: Any) -> None:
        """Call an observer. Its failure must not affect the answer."""
        try:
            tell(*what)
        except Exception:
            _log.exception("a request could not be recorded")


def _spelling(path: str) -> str:
    identifiers = {name: f"(?P<{name}>{one.pattern})" for name, (one, _) in IDENTIFIERS.items()}
    return re.escape(path).replace(r"\{", "{").replace(r"\}", "}").format(**identifiers)


def _header(scope: Scope, name: bytes) -> bytes | None:
    given = [value for other, value in scope["headers"] if other == name]
    return given[0] if len(given) == 1 else None


def _known(by: Principal | None) -> Principal:
    if by is None:
        raise Refused(401, "Authorization: a valid 'Bearer TOKEN' is needed")
    return by


def _in_bytes(answer: Answer) -> Answer:
    if isinstance(answer.body, Mapping):
        return Answer(answer.status, dumps_finite(answer.body))
    return answer


def _refusal(error: Exception) -> Answer:
    if isinstance(error, Refused):
        return _in_bytes(Answer(error.status, error.body))
    if isinstance(error, OSError):
        _log.error("a request could not be served: %s", error)
        text = f"the daemon's disk or network failed ({error.strerror or error})"
        return _in_bytes(Answer(503, unavailable(text).body))
    _log.error("a request failed", exc_info=error)
    text = f"the daemon failed on this request ({type(error).__name__}): see its log"
    return _in_bytes(Answer(500, {"error": text}))


def _record(data: Any, kind: type[Any], strict: bool = True) -> Any:
    try:
        return read_record(data, kind, strict)
    except ValueError as error:
        raise Refused(400, str(error)) from None


async def _whole(receive: Receive) -> bytes:
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Refused(_GONE, "the client went away")
        part = message.get("body", b"")
        size += len(part)
        if size > MAX_BODY:
            raise Refused(413, f"body: at most {MAX_BODY} bytes")
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


def read_body(data: bytes) -> Any:
    """A JSON value that can be stored, sent and shown. Raises ``Refused`` for any other."""
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
            # Larger floats are fine, since msgspec refuses infinite ones.
            if isinstance(value, int) and not -_LARGEST <= value < _LARGEST:
                raise Refused(400, f"{where[:64]!a}: not a 64-bit number")
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
        raise Refused(400, f"{where[:64]!a}: must not contain the character {found[0]!a}")
