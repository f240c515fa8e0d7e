"""HTTP/1.1 as far as chat clients speak it: requests from bytes, and responses into bytes."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Generator, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import msgspec

from rollpacker.connection_limits import ConnectionPlace, Places
from rollpacker.env.base import Message
from rollpacker.env.messages import said

_LONGEST_HEAD = 64 << 10
_LONGEST_BODY = 8 << 20
_MOST_CHUNKS = 1 << 15  # of a body: each costs work, however short it is
_LONGEST_LINE = 256  # of a chunk's size


class RefusedError(Exception):
    """A request that is not served. ``status`` is none of 408, 409, 429 and 500 or more, because
    clients repeat those. ``code`` is OpenAI's, for programs."""

    def __init__(self, status: int, message: str, code: str = "unsupported") -> None:
        super().__init__(message)
        self.status = status
        self.code = code

    def response(self) -> HttpResponse:
        kind = "authentication_error" if self.status == 401 else "invalid_request_error"
        error = {"message": str(self), "type": kind, "param": None, "code": self.code}
        return HttpResponse(status=self.status, body=msgspec.json.encode({"error": error}))


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpRequest:
    """A complete request. ``path`` has no query, ``headers`` are by lower-case name. ``last``: the
    client wants the connection closed after the response."""

    method: str
    path: str
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    body: bytes = b""
    last: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpResponse:
    """A response: JSON unless ``kind`` differs."""

    status: int = 200
    body: bytes = b""
    kind: str = "application/json"

    def encoded(self, *, last: bool) -> bytes:
        head = (
            f"HTTP/1.1 {self.status} {HTTPStatus(self.status).phrase}\r\n"
            f"content-type: {self.kind}\r\n"
            f"content-length: {len(self.body)}\r\n"
            f"connection: {'close' if last else 'keep-alive'}\r\n\r\n"
        )
        return head.encode("ascii") + self.body


CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class RequestReader:
    """Takes a connection's bytes as they come, and gives its requests.

    ``check`` gets a request's headers before its body is read. Its error ends the connection.
    ``waited_for``: the client sends no body before it has read ``CONTINUE``.
    """

    def __init__(self, check: Callable[[Mapping[str, str]], object]) -> None:
        self.waited_for = False
        self._check = check
        self._unread = bytearray()
        self._parser = self._request()

    def feed(self, data: bytes) -> None:
        """Add bytes. Raises ``RefusedError`` if they are far too many."""
        if len(self._unread) + len(data) > 2 * _LONGEST_BODY:
            raise _too_large()
        self._unread += data

    @property
    def unread(self) -> int:
        """Bytes that belong to no returned request yet."""
        return len(self._unread)

    def next(self) -> HttpRequest | None:
        """Return the next request once it is complete, else None. Raises ``RefusedError`` on bytes
        that are no request. Nothing can be read after that."""
        try:
            next(self._parser)
        except StopIteration as end:
            self._parser = self._request()
            return end.value
        return None

    def _request(self) -> Generator[None, None, HttpRequest]:
        head = yield from self._until(b"\r\n\r\n", _LONGEST_HEAD, 431)
        first, *lines = head.decode("latin-1").lstrip("\r\n").split("\r\n")
        method, target, version = _first_line(first)
        headers = dict(_header(line) for line in lines)
        self._check(headers)
        self.waited_for = headers.get("expect", "").lower() == "100-continue"
        body = yield from self._body(headers)
        self.waited_for = False
        wish = headers.get("connection", "").lower()
        last = "close" in wish or (version == "HTTP/1.0" and "keep-alive" not in wish)
        path = target.partition("?")[0]
        return HttpRequest(method=method, path=path, headers=headers, body=body, last=last)

    def _body(self, headers: Mapping[str, str]) -> Generator[None, None, bytes]:
        coding = headers.get("transfer-encoding", "").lower()
        if coding == "chunked":
            return (yield from self._chunks())
        if coding:
            raise _malformed(f"transfer-encoding '{coding}' is not read: send 'chunked'")
        size = headers.get("content-length", "0")
        return (yield from self._exactly(_number(size, 10)))

    def _chunks(self) -> Generator[None, None, bytes]:
        body = bytearray()
        for _ in range(_MOST_CHUNKS):
            line = yield from self._until(b"\r\n", _LONGEST_LINE, 400)
            size = _number(line.partition(b";")[0].decode("latin-1").strip(), 16)
            if not size:
                break
            body += yield from self._exactly(size, _LONGEST_BODY - len(body))
            if (yield from self._exactly(2)) != b"\r\n":
                raise _malformed("a chunk is longer than it says")
        else:
            raise _malformed(f"more than {_MOST_CHUNKS} chunks")
        left = _LONGEST_HEAD
        while trailer := (yield from self._until(b"\r\n", left, 431)):
            left -= len(trailer)
        return bytes(body)

    def _until(self, mark: bytes, most: int, status: int) -> Generator[None, None, bytes]:
        start = 0
        while (at := self._unread.find(mark, start, most + len(mark))) < 0:
            if len(self._unread) >= most + len(mark):
                raise RefusedError(status, f"more than {most} bytes of headers", "malformed")
            start = max(0, len(self._unread) - len(mark) + 1)
            yield
        found = bytes(self._unread[:at])
        del self._unread[: at + len(mark)]
        return found

    def _exactly(self, size: int, most: int = _LONGEST_BODY) -> Generator[None, None, bytes]:
        if size > most:
            raise _too_large()
        while len(self._unread) < size:
            yield
        found = bytes(self._unread[:size])
        del self._unread[:size]
        return found


def _first_line(line: str) -> tuple[str, str, str]:
    parts = line.split(" ")
    if len(parts) != 3 or parts[2] not in ("HTTP/1.1", "HTTP/1.0"):
        raise _malformed("the first line is none of HTTP/1.1")
    return parts[0], parts[1], parts[2]


def _header(line: str) -> tuple[str, str]:
    name, colon, value = line.partition(":")
    if not colon or not name or name != name.strip():
        raise _malformed("a header is no 'name: value'")
    return name.lower(), value.strip()


def _number(text: str, base: int) -> int:
    digits = "0123456789abcdef"[:base]
    if not text or len(text) > 16 or any(letter not in digits for letter in text.lower()):
        raise _malformed("a length is no number")
    return int(text, base)


def _malformed(why: str) -> RefusedError:
    return RefusedError(400, f"this is no HTTP request: {why}", "malformed")


def _too_large() -> RefusedError:
    return RefusedError(413, f"a request has more than {_LONGEST_BODY >> 20} MiB", "too_large")


# A client's connection in the event loop: its requests one after the other.

_log = logging.getLogger(__name__)
_HEAD_S = 10.0  # seconds in which a stranger must send the headers of a request
_AHEAD = 1 << 20  # bytes of further requests that are kept while one is answered
Handle = Callable[[HttpRequest], Awaitable[HttpResponse]]
"""Answers a request. It is cancelled when the client has gone."""
Check = Callable[[Mapping[str, str]], Hashable]
"""Returns the owner of a request from its headers, or raises ``RefusedError``."""


_FAILED = RefusedError(400, "this request could not be answered: see the run's log", "failed")
"""With a status that clients do not repeat, because the request would fail again."""


class ClientConnection(asyncio.Protocol):
    """One client."""

    def __init__(self, handle: Handle, check: Check, places: Places) -> None:
        self._handle = handle
        self._check = check
        self._places = places
        self._reader = RequestReader(self._look)
        self._task: asyncio.Task[None] | None = None
        self._transport: asyncio.Transport | None = None
        self._place: ConnectionPlace
        self._patience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._place = self._places.take(self.abort)
        self._patience = asyncio.get_running_loop().call_later(_HEAD_S, self.abort)

    def _look(self, headers: Mapping[str, str]) -> None:
        who = self._check(headers)
        self._wait_no_longer()
        self._places.know(self._place, who)

    def data_received(self, data: bytes) -> None:
        if self._task is not None and self._reader.unread > _AHEAD:
            self.abort()
        else:
            self._guarded(lambda: self._reader.feed(data))

    def _guarded(self, first: Callable[[], None] = lambda: None) -> None:
        # An error ends this connection and no other.
        try:
            first()
            self._go_on()
        except RefusedError as error:
            self._end(error.response())
        except Exception:
            _log.exception("a connection to the agents' endpoint failed")
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._give_up()
        self._wait_no_longer()
        self._places.leave(self._place)

    def abort(self) -> None:
        self._give_up()
        if self._transport is not None:
            self._transport.abort()

    def _go_on(self) -> None:
        if self._task is not None:
            return
        request = self._reader.next()
        if request is not None:
            self._task = asyncio.get_running_loop().create_task(self._answer(request))
        elif self._reader.waited_for:
            self._reader.waited_for = False
            self._write(CONTINUE)

    async def _answer(self, request: HttpRequest) -> None:
        self._places.answering(self._place, True)
        try:
            response = await self._handle(request)
        except Exception:
            _log.exception("a request to the agents' endpoint failed")
            response = _FAILED.response()
        self._places.answering(self._place, False)
        self._task = None
        if request.last:
            self._end(response)
            return
        self._write(response.encoded(last=False))
        self._guarded()

    def _end(self, response: HttpResponse) -> None:
        self._write(response.encoded(last=True))
        self._give_up()
        if self._transport is not None:
            self._transport.close()

    def _write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def _give_up(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = None

    def _wait_no_longer(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None


# A model's reply as OpenAI's chat API gives it, whole or as a stream.

MODEL = "policy"
"""The name of the trained model. Requests may use any other."""

_OURS = ("tool_calls", "bad_calls", "text")  # keys of a reply that programs do not get as they are
_USAGE = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
"""The engine counts tokens, not this server."""


def shown(reply: Message, *, calling: bool) -> Message:
    """Return a reply as its program sees it. Calls become text as the model wrote them, if the
    program gave no tools (``calling``) or no call was understood."""
    more = {key: value for key, value in reply.items() if key not in _OURS}
    calls = reply.get("tool_calls") if calling else None
    return more | ({"tool_calls": calls} if calls else {"content": said(reply)})


def completion(reply: Message, body: Mapping[str, Any]) -> HttpResponse:
    """Return the response to a request's body, as a stream of one piece if it asks for one."""
    message = _message(reply)
    calls = message.get("tool_calls", ())
    finish = "tool_calls" if calls else "stop"
    if not body.get("stream"):
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish}
        whole = _object("chat.completion", body) | {"choices": [choice], "usage": _USAGE}
        return HttpResponse(body=msgspec.json.encode(whole))
    if calls:
        numbers = enumerate(calls)
        message["tool_calls"] = [{"index": number} | call for number, call in numbers]
    chunks = [msgspec.json.encode(chunk) for chunk in _chunks(message, finish, body)]
    events = b"".join(b"data: " + chunk + b"\n\n" for chunk in (*chunks, b"[DONE]"))
    return HttpResponse(body=events, kind="text/event-stream")


def models(name: str = "") -> HttpResponse:
    """Return the one model, or a list of it."""
    model = {"id": name or MODEL, "object": "model", "created": 0, "owned_by": "rollpacker"}
    return HttpResponse(
        body=msgspec.json.encode(model if name else {"object": "list", "data": [model]})
    )


def _chunks(message: Message, finish: str, body: Mapping[str, Any]) -> Iterator[Any]:
    common = _object("chat.completion.chunk", body)
    for delta, end in ((message, None), ({}, finish)):
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": end}
        yield common | {"choices": [choice]}
    options = body.get("stream_options")
    if isinstance(options, dict) and options.get("include_usage"):
        yield common | {"choices": [], "usage": _USAGE}


def _object(kind: str, body: Mapping[str, Any]) -> dict[str, Any]:
    model = body.get("model")
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": model if isinstance(model, str) else MODEL,
    }


def _message(reply: Message) -> Message:
    message = {**reply, "role": "assistant", "refusal": None}
    if reply.get("tool_calls"):
        message["content"] = reply.get("content") or None
    return message
