"""A socket between a driver and a worker. The driver's end never waits, the worker's does."""

from __future__ import annotations

import asyncio
import io
import pickle
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rollpacker.processes.frames import Inbox, Outbox

HEAD = struct.Struct("<Q")
"""The length before each message."""


def encode(message: Any) -> memoryview:
    """Pickle a message for a socket, without its length. An older protocol would copy every array
    twice, and numpy's own reduction is Python code."""
    written = io.BytesIO()
    pickler = pickle.Pickler(written, pickle.HIGHEST_PROTOCOL)
    pickler.dispatch_table = _REDUCED
    pickler.dump(message)
    return written.getbuffer()


def _reduced(array: NDArray[Any]) -> Any:
    if array.ndim == 1 and array.flags.c_contiguous and not array.dtype.hasobject:
        return np.frombuffer, (pickle.PickleBuffer(array.data), array.dtype.str)
    return array.__reduce_ex__(pickle.HIGHEST_PROTOCOL)


_REDUCED = {np.ndarray: _reduced}


class Wire:
    """A worker's end of a socket, which waits to send and to receive whole messages. One thread may
    receive while another one sends. It can be pickled into a new process."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def send(self, obj: Any, /) -> None:
        """Send a message. Raises ``OSError`` if the other end is gone."""
        data = encode(obj)
        head = HEAD.pack(len(data))
        sent = self._end.sendmsg([head, data])
        if sent < HEAD.size:
            self._end.sendall(head[sent:])
        if sent < HEAD.size + len(data):
            self._end.sendall(data[max(0, sent - HEAD.size) :])

    def recv(self) -> Any:
        """Wait for the next message. Raises ``EOFError`` or ``OSError`` if the other end is
        gone."""
        return pickle.loads(self.message())

    def message(self) -> bytearray:
        return self._exactly(HEAD.unpack(self._exactly(HEAD.size))[0])

    def fileno(self) -> int:
        """Readable when a message or the end has come."""
        return self._end.fileno()

    def _exactly(self, size: int) -> bytearray:
        data = bytearray(size)
        left = memoryview(data)
        while left:
            count = self._end.recv_into(left)
            if not count:
                raise EOFError
            left = left[count:]
        return data

    def close(self) -> None:
        self._end.close()


class Link:
    """Whole messages in order. It keeps messages that the other end does not take yet, so a slow
    process does not block the driver. ``end``: a connected socket. ``connect`` may bring it
    later."""

    def __init__(self, end: socket.socket | None = None) -> None:
        self._end: socket.socket | None = None
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._inbox = Inbox(HEAD, pickle.loads)
        self._outbox = Outbox()
        if end is not None:
            self.connect(end)

    def connect(self, end: socket.socket) -> bool:
        """Use a connected socket. False if there is one already, or the link is closed."""
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
            gone: called once when the other end is gone, but not after ``close``.
            sign: called when bytes have come.
        """
        self._loop, self._hear, self._gone, self._sign = loop, hear, gone, sign
        self._begin()

    def _begin(self) -> None:
        if self._loop is not None and self._end is not None:
            self._loop.add_reader(self._end, self._readable)
            if self._outbox.parts:
                self._loop.add_writer(self._end, self._writable)

    def send(self, message: Any) -> None:
        """Send a message, at once or later. If the other end is gone, nothing happens."""
        self.send_encoded(encode(message))

    def send_encoded(self, data: memoryview) -> None:
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
        if not self._closed:
            self.close()
            if self._loop is not None:
                self._gone()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._outbox.parts.clear()
        if self._end is None:
            return
        if self._loop is not None:
            self._loop.remove_reader(self._end)
            self._loop.remove_writer(self._end)
        # A process forked meanwhile may hold a copy of the descriptor.
        with suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)
        self._end.close()

    def drain(self, seconds: float) -> None:
        """Wait at most ``seconds`` for the other end to take all messages and leave, then close."""
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


class Host(Protocol):
    """The driver's view of a worker's process."""

    @property
    def link(self) -> Link: ...

    @property
    def pid(self) -> int:
        """Its process id on its node, 0 if it is unknown."""
        ...

    def wait(self, seconds: float) -> None:
        """Wait at most ``seconds`` for its end."""
        ...

    def kill(self) -> None:
        """Kill it, even if it is stopped, without waiting. The link notices."""
        ...

    async def end(self, seconds: float = 5.0) -> str:
        """How it ended, after at most ``seconds``."""
        ...
