"""HTTP/1.1 as far as chat clients speak it: requests out of bytes, and responses into bytes."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus

import msgspec

_LONGEST_HEAD = 64 << 10
_LONGEST_BODY = 8 << 20
_MOST_CHUNKS = 1 << 15
"""Of a body: each costs work, however short it is."""
_LONGEST_LINE = 256
"""Of a chunk's size."""


class RefusedError(Exception):
    """A request that is not served.

    Args:
        status: HTTP status. Clients ask again on 408, 409, 429 and from 500 on, so none is these.
        message: what is not possible, and why.
        code: OpenAI's, for programs.
    """

    def __init__(self, status: int, message: str, code: str = "unsupported") -> None:
        super().__init__(message)
        self.status = status
        self.code = code

    def response(self) -> HttpResponse:
        """As OpenAI would say it."""
        kind = "authentication_error" if self.status == 401 else "invalid_request_error"
        error = {"message": str(self), "type": kind, "param": None, "code": self.code}
        return HttpResponse(status=self.status, body=msgspec.json.encode({"error": error}))


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpRequest:
    """One that has come as a whole.

    Args:
        method: such as POST.
        path: without the query.
        headers: by lower-case name.
        body: decoded from chunks.
        last: the client wants the connection closed behind the response.
    """

    method: str
    path: str
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    body: bytes = b""
    last: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpResponse:
    """What is answered: JSON where ``kind`` does not say otherwise."""

    status: int = 200
    body: bytes = b""
    kind: str = "application/json"

    def encoded(self, *, last: bool) -> bytes:
        """As bytes; ``last`` says that the connection is closed behind it."""
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

    Args:
        check: is given a request's headers before its body is read; what it raises ends all.

    Attributes:
        waited_for: the client sends no body before it has read ``CONTINUE``.
    """

    def __init__(self, check: Callable[[Mapping[str, str]], object]) -> None:
        self.waited_for = False
        self._check = check
        self._unread = bytearray()
        self._parser = self._request()

    def feed(self, data: bytes) -> None:
        """Bytes that have come. Raises ``RefusedError`` where they are too many by far."""
        if len(self._unread) + len(data) > 2 * _LONGEST_BODY:
            raise _too_large()
        self._unread += data

    @property
    def unread(self) -> int:
        """Bytes that are no part of a request yet that was given."""
        return len(self._unread)

    def next(self) -> HttpRequest | None:
        """The next request, if all of it is there.

        Raises ``RefusedError`` on what is no request; nothing can be read behind it.
        """
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
