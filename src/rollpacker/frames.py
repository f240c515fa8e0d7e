"""Messages between the driver and a child process: length-prefixed frames over a socket."""

from __future__ import annotations

import socket
import struct
from enum import Enum

HEADER = struct.Struct("<I")
LARGEST_REPLY = 1 << 20


class WireError(RuntimeError):
    """The other side wrote something that none of our processes writes."""


class State(Enum):
    """Of the other side."""

    OPEN = "open"
    CLOSED = "closed"
    BROKEN = "broken"
    """It wrote something that is no frame."""


def frame(payload: bytes) -> bytes:
    """The payload with its length in front."""
    return HEADER.pack(len(payload)) + payload


class Channel:
    """The driver's end: it never waits, neither to write nor to read.

    A frame of more than ``largest`` bytes is not read.
    """

    def __init__(self, sock: socket.socket, largest: int = LARGEST_REPLY) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._largest = largest
        self._unread = bytearray()
        self._unsent = bytearray()

    def fileno(self) -> int:
        """File descriptor, for event loops."""
        return self._sock.fileno()

    @property
    def unsent(self) -> bool:
        """Whether ``flush`` has something to write."""
        return bool(self._unsent)

    def send(self, data: bytes) -> bool:
        """Write frames, keeping what does not fit now; false if ``flush`` must follow."""
        if not self._unsent:
            data = data[self._write(data) :]
        self._unsent += data
        return self.flush()

    def flush(self) -> bool:
        """Write what is kept; true when nothing is left. A dead reader is noticed by reading."""
        while self._unsent:
            written = self._write(self._unsent)
            if not written:
                return False
            del self._unsent[:written]
        return True

    def _write(self, data: bytes | bytearray) -> int:
        """Bytes that fit now; all of them where nobody reads any more."""
        try:
            return self._sock.send(data)
        except BlockingIOError:
            return 0
        except OSError:
            return len(data)

    def receive(self) -> tuple[list[bytes], State]:
        """Complete frames that have arrived, and what the other side is like after them."""
        state = State.OPEN
        try:
            while data := self._sock.recv(1 << 16):
                self._unread += data
                if len(self._unread) > self._largest:
                    break
            else:
                state = State.CLOSED
        except BlockingIOError:
            pass
        except OSError:
            state = State.CLOSED
        return self._frames(), State.BROKEN if self._next_is_too_large() else state

    def _frames(self) -> list[bytes]:
        frames: list[bytes] = []
        while len(self._unread) >= HEADER.size and not self._next_is_too_large():
            end = HEADER.size + HEADER.unpack_from(self._unread)[0]
            if end > len(self._unread):
                break
            frames.append(bytes(self._unread[HEADER.size : end]))
            del self._unread[:end]
        return frames

    def _next_is_too_large(self) -> bool:
        size = HEADER.size
        return len(self._unread) >= size and HEADER.unpack_from(self._unread)[0] > self._largest

    def close(self) -> None:
        """Close the socket."""
        self._sock.close()
