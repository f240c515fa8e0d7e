"""The driver's end of a socket to a worker, wherever that is: it never waits."""

from __future__ import annotations

import asyncio
import pickle
import socket
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from rollpacker.runtime.ipc.wire import HEAD, encode, head

_PIECE = 1 << 16
"""Bytes that are asked for at once where small messages may come."""
_GULP = 1 << 20
"""Bytes of a long message that are taken before others have their turn."""


class Link:
    """Whole messages, in order, none lost while both ends live.

    What the other end does not take is kept here and sent when it does, so a process that is frozen
    or slow keeps nobody from the others.

    Args:
        end: a connected socket; default: one will come (``connect``).
    """

    def __init__(self, end: socket.socket | None = None) -> None:
        self._end: socket.socket | None = None
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._unsent: deque[memoryview] = deque()
        self._piece = bytearray(_PIECE)
        self._held = 0
        self._long: bytearray | None = None
        self._filled = 0
        if end is not None:
            self.connect(end)

    def connect(self, end: socket.socket) -> bool:
        """Go on with a connected socket; false where there was one, or nobody wants it."""
        if self._end is not None or self._closed:
            return False
        end.setblocking(False)
        self._end = end
        self._begin()
        return True

    def open(
        self,
        loop: asyncio.AbstractEventLoop,
        hear: Callable[[Any], None],
        gone: Callable[[], None],
        sign: Callable[[], None] = lambda: None,
    ) -> None:
        """Begin to listen.

        Args:
            loop: calls the others.
            hear: takes each message.
            gone: told once that the other end is gone; not after ``close``.
            sign: told that something came, a part of a message perhaps.
        """
        self._loop, self._hear, self._gone, self._sign = loop, hear, gone, sign
        self._begin()

    def _begin(self) -> None:
        if self._loop is not None and self._end is not None:
            self._loop.add_reader(self._end, self._readable)
            if self._unsent:
                self._loop.add_writer(self._end, self._writable)

    def send(self, message: Any) -> None:
        """Send a message, now or when the other end takes it; nothing happens where that is gone:
        ``gone`` is told so."""
        self.send_encoded(encode(message))

    def send_encoded(self, data: memoryview) -> None:
        """The same, of a message that goes to several (``encode``)."""
        if self._closed:
            return
        parts = [memoryview(head(len(data))), data]
        if self._end is not None and not self._unsent:
            parts = _offer(self._end, parts)
            if parts and self._loop is not None:
                self._loop.add_writer(self._end, self._writable)
        self._unsent.extend(parts)

    def _writable(self) -> None:
        assert self._end is not None
        self._unsent.extendleft(_offer(self._end, [self._unsent.popleft()]))
        if not self._unsent and self._loop is not None:
            self._loop.remove_writer(self._end)

    def _readable(self) -> None:
        try:
            count = self._receive()
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            count = 0
        if not count:
            self.sever()
            return
        self._sign()
        for message in self._whole(count):
            if self._closed:
                return
            self._hear(message)

    def _receive(self) -> int:
        assert self._end is not None
        if self._long is None:
            return self._end.recv_into(memoryview(self._piece)[self._held :])
        return self._end.recv_into(memoryview(self._long)[self._filled : self._filled + _GULP])

    def _whole(self, count: int) -> list[Any]:
        """The messages that are complete with so many bytes more."""
        if self._long is None:
            self._held += count
            return self._split()
        self._filled += count
        if self._filled < len(self._long):
            return []
        message, self._long = self._long, None
        return [pickle.loads(message)]

    def _split(self) -> list[Any]:
        """Take the messages out of what has come; a long one's rest goes where it will be."""
        messages: list[Any] = []
        start, view = 0, memoryview(self._piece)
        while self._held - start >= HEAD:
            begin = start + HEAD
            size = int.from_bytes(view[start:begin], "little")
            if begin + size > self._held:
                if HEAD + size > _PIECE:
                    self._long = bytearray(size)
                    self._filled = self._held - begin
                    self._long[: self._filled] = view[begin : self._held]
                    start = self._held
                break
            messages.append(pickle.loads(view[begin : begin + size]))
            start = begin + size
        self._held -= start
        view[: self._held] = view[start : start + self._held]
        return messages

    def sever(self) -> None:
        """Take the other end for gone."""
        if not self._closed:
            self.close()
            if self._loop is not None:
                self._gone()

    def close(self) -> None:
        """Say and hear no more; the other end sees it."""
        if self._closed:
            return
        self._closed = True
        self._unsent.clear()
        if self._end is None:
            return
        if self._loop is not None:
            self._loop.remove_reader(self._end)
            self._loop.remove_writer(self._end)
        # A process that was forked meanwhile may hold a copy.
        with suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)
        self._end.close()

    def drain(self, seconds: float) -> None:
        """Wait so long for the other end to take what was sent, and to go; then close."""
        if not self._closed and self._end is not None:
            if self._loop is not None:
                self._loop.remove_reader(self._end)
                self._loop.remove_writer(self._end)
            self._end.settimeout(max(seconds, 0.001))
            with suppress(OSError):
                for part in self._unsent:
                    self._end.sendall(part)
                while self._end.recv(_PIECE):
                    pass
        self.close()


def _offer(end: socket.socket, parts: list[memoryview]) -> list[memoryview]:
    """What the other end does not take of these now."""
    try:
        sent = end.sendmsg(parts)
    except (BlockingIOError, InterruptedError):
        return parts
    except OSError:
        return []  # its end is read
    while parts and sent >= len(parts[0]):
        sent -= len(parts.pop(0))
    return [parts[0][sent:], *parts[1:]] if parts else []
