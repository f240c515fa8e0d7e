"""The driver's end of a socket to a worker, wherever that is: it never waits."""

from __future__ import annotations

import asyncio
import pickle
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from rollpacker.processes.frames import Inbox, Outbox
from rollpacker.runtime.ipc.wire import HEAD, encode


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
        self._inbox = Inbox(HEAD, pickle.loads)
        self._outbox = Outbox()
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
            if self._outbox.parts:
                self._loop.add_writer(self._end, self._writable)

    def send(self, message: Any) -> None:
        """Send a message, now or when the other end takes it; nothing happens where that is gone:
        ``gone`` is told so."""
        self.send_encoded(encode(message))

    def send_encoded(self, data: memoryview) -> None:
        """The same, of a message that goes to several (``encode``)."""
        if self._closed:
            return
        kept = bool(self._outbox.parts)
        self._outbox.send(self._end, [memoryview(HEAD.pack(len(data))), data])
        if self._outbox.parts and not kept and self._end is not None and self._loop is not None:
            self._loop.add_writer(self._end, self._writable)

    def _writable(self) -> None:
        assert self._end is not None
        if self._outbox.flush(self._end) and self._loop is not None:
            self._loop.remove_writer(self._end)

    def _readable(self) -> None:
        assert self._end is not None
        try:
            count = self._inbox.receive(self._end)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            count = 0
        if not count:
            self.sever()
            return
        self._sign()
        for message in self._inbox.whole():
            if self._closed:
                return
            self._hear(message)

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
        self._outbox.parts.clear()
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
                for part in self._outbox.parts:
                    self._end.sendall(part)
                while self._end.recv(1 << 16):
                    pass
        self.close()
