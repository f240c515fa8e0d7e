"""Messages between the driver and a child process: length-prefixed frames over a socket.

In such a child a user's code runs, so what it writes may be anything. It comes in by one door,
``Channel.hear``: frames of a bounded size, and whatever cannot be taken is the child's fault. Where
frames are MessagePack, ``check_values`` bounds the work of decoding them, too.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from enum import Enum
from typing import Final

from rollpacker.errors import one_line

MOST_VALUES: Final = 200_000
DEEPEST: Final = 100
"""Values of a message, and how deep they are nested: of a kilobyte of text or of one digit each."""
HEADER = struct.Struct("<I")
LARGEST_REPLY = 1 << 20


class WireError(RuntimeError):
    """The other side wrote something that none of our processes writes."""


class PeerState(Enum):
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

    def hear(self, take: Callable[[bytes], object]) -> str | None:
        """Hand what has arrived to ``take``, a frame at a time; then why the other side must go, if
        it must: empty where it is gone by itself. Never raises.

        Args:
            take: what it raises, the other side has brought about.
        """
        frames, state = self.receive()
        try:
            for each in frames:
                take(each)
        except WireError as error:
            return f"wrote nonsense ({error})"
        except Exception as error:
            return f"wrote nonsense ({one_line(error)})"
        if state is PeerState.BROKEN:
            return f"wrote more than {self._largest >> 20} MiB at once"
        return "" if state is PeerState.CLOSED else None

    def receive(self) -> tuple[list[bytes], PeerState]:
        """Complete frames that have arrived, and what the other side is like after them."""
        state = PeerState.OPEN
        try:
            while data := self._sock.recv(1 << 16):
                self._unread += data
                if len(self._unread) > self._largest:
                    break
            else:
                state = PeerState.CLOSED
        except BlockingIOError:
            pass
        except OSError:
            state = PeerState.CLOSED
        return self._frames(), PeerState.BROKEN if self._next_is_too_large() else state

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


_SIZES: Final = {
    0xC4: (1, 0),
    0xC5: (2, 0),
    0xC6: (4, 0),  # bytes
    0xC7: (1, 1),
    0xC8: (2, 1),
    0xC9: (4, 1),  # extensions
    0xD9: (1, 0),
    0xDA: (2, 0),
    0xDB: (4, 0),  # texts
}
"""Of a length, and of what stands behind it."""
_FIXED: Final = {
    0xCA: 4,
    0xCB: 8,
    0xCC: 1,
    0xCD: 2,
    0xCE: 4,
    0xCF: 8,
    0xD0: 1,
    0xD1: 2,
    0xD2: 4,
    0xD3: 8,
    0xD4: 2,
    0xD5: 3,
    0xD6: 5,
    0xD7: 9,
    0xD8: 17,
}
_HOLDERS: Final = {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}
"""The size of a count, and values for each that it counts."""


def check_values(data: bytes) -> None:
    """Walk a MessagePack value without decoding it, which may cost a hundred times its bytes.

    Raises ``ValueError`` where it has more than ``MOST_VALUES`` values, is nested deeper than
    ``DEEPEST``, or has a key that is no plain value; what is torn is left to the decoder.
    """
    at, left = 0, [(1, False)]
    for _ in range(MOST_VALUES):
        while left and not left[-1][0]:
            left.pop()
        if not left or at >= len(data):
            return
        count, keyed = left[-1]
        left[-1] = count - 1, keyed
        at, inside, pairs = _step(data, at)
        # Keys are hashed: lists as tuples, and those collide where somebody wants it.
        if inside and keyed and not count % 2:
            raise ValueError("it has a key that is a list or an object")
        if inside:
            left.append((inside, pairs))
            if len(left) > DEEPEST:
                raise ValueError(f"it is nested deeper than {DEEPEST} levels")
    raise ValueError(f"it has more than {MOST_VALUES} values")


def _step(data: bytes, at: int) -> tuple[int, int, bool]:
    """Behind one value's head and bytes, how many values it holds, and whether in pairs."""
    code = data[at]
    at += 1
    if code < 0x80 or code >= 0xE0:
        return at, 0, False
    if code < 0x90:
        return at, 2 * (code & 15), True
    if code < 0xA0:
        return at, code & 15, False
    if code < 0xC0:
        return at + (code & 31), 0, False
    if code in _HOLDERS:
        size, each = _HOLDERS[code]
        return at + size, each * int.from_bytes(data[at : at + size], "big"), each == 2
    if code in _SIZES:
        size, more = _SIZES[code]
        return at + size + more + int.from_bytes(data[at : at + size], "big"), 0, False
    return at + _FIXED.get(code, 0), 0, False
