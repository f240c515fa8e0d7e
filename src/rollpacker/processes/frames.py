"""Messages between the driver and a child process: length-prefixed frames over a socket.

A child runs a user's code, so it may write anything. ``Channel.hear`` is the only entrance: frames
have a bounded size, and everything that cannot be read is the child's fault. If frames are
MessagePack, ``check_values`` also bounds the work of decoding them.
"""

from __future__ import annotations

import socket
import struct
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Final, Generic, TypeVar

from rollpacker.errors import one_line

MOST_VALUES: Final = 200_000
DEEPEST: Final = 100
"""The most values and levels of a message. A value is one digit or a kilobyte of text."""
HEADER = struct.Struct("<I")
LARGEST_REPLY = 1 << 20
_PIECE = 1 << 16
"""The size of a read while small messages may come, bytes."""
_GULP = 1 << 20
"""The size of a read of a long message, bytes. Then other sockets have their turn."""

Message = TypeVar("Message")


class WireError(RuntimeError):
    """The other side wrote something that none of our processes writes."""


class PeerState(Enum):
    """The state of the other side."""

    OPEN = "open"
    CLOSED = "closed"
    BROKEN = "broken"
    """It wrote something that is no frame."""


def frame(payload: bytes) -> bytes:
    """Put the payload's length in front."""
    return HEADER.pack(len(payload)) + payload


class Inbox(Generic[Message]):
    """Splits a socket's bytes into messages, each after its length.

    Args:
        decode: makes a message from a view of its bytes, which is valid during the call.
        largest: bytes of the largest accepted message. None: no limit.
    """

    def __init__(
        self,
        head: struct.Struct,
        decode: Callable[[memoryview], Message],
        largest: int | None = None,
    ) -> None:
        self.broken = False
        """A message was too large, so no more messages come."""
        self._head = head
        self._decode = decode
        self._largest = largest
        self._piece = bytearray(_PIECE)
        self._held = 0
        self._long: bytearray | None = None
        self._filled = 0

    def receive(self, end: socket.socket) -> int:
        """Read some bytes and return their number, 0 at the end. Raises ``OSError``."""
        if self._long is None:
            count = end.recv_into(memoryview(self._piece)[self._held :])
            self._held += count
        else:
            count = end.recv_into(memoryview(self._long)[self._filled : self._filled + _GULP])
            self._filled += count
        return count

    def whole(self) -> list[Message]:
        if self._long is None:
            return self._split()
        if self._filled < len(self._long):
            return []
        message, self._long = self._long, None
        return [self._decode(memoryview(message))]

    def _split(self) -> list[Message]:
        messages: list[Message] = []
        start, view = 0, memoryview(self._piece)
        while self._held - start >= self._head.size:
            begin = start + self._head.size
            size = self._head.unpack_from(view, start)[0]
            if self._largest is not None and size > self._largest:
                self.broken = True
                break
            if begin + size > self._held:
                if self._head.size + size > _PIECE:
                    self._long = bytearray(size)
                    self._filled = self._held - begin
                    self._long[: self._filled] = view[begin : self._held]
                    start = self._held
                break
            messages.append(self._decode(view[begin : begin + size]))
            start = begin + size
        self._held -= start
        view[: self._held] = view[start : start + self._held]
        return messages


class Outbox:
    """Bytes that a socket's other end has not taken yet. Nothing here waits."""

    def __init__(self) -> None:
        self.parts: deque[memoryview] = deque()

    def send(self, end: socket.socket | None, parts: list[memoryview]) -> None:
        """Write ``parts`` after the kept ones. Keep the rest, or all parts without an ``end``."""
        if end is not None and not self.parts:
            parts = _offer(end, parts)
        self.parts.extend(parts)

    def flush(self, end: socket.socket) -> bool:
        """Write some of the kept bytes, and return whether none are left."""
        if self.parts:
            self.parts.extendleft(_offer(end, [self.parts.popleft()]))
        return not self.parts


def _offer(end: socket.socket, parts: list[memoryview]) -> list[memoryview]:
    """Send, and return the parts that the other end does not take now."""
    try:
        sent = end.sendmsg(parts)
    except (BlockingIOError, InterruptedError):
        return parts
    except OSError:
        return []  # reading will find that it is gone
    while parts and sent >= len(parts[0]):
        sent -= len(parts.pop(0))
    return [parts[0][sent:], *parts[1:]] if parts else []


class Channel:
    """The driver's end, which never waits. It reads no frame of more than ``largest`` bytes."""

    def __init__(self, sock: socket.socket, largest: int = LARGEST_REPLY) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._largest = largest
        self._inbox = Inbox(HEADER, bytes, largest)
        self._outbox = Outbox()

    def fileno(self) -> int:
        return self._sock.fileno()

    @property
    def unsent(self) -> bool:
        return bool(self._outbox.parts)

    def send(self, data: bytes) -> bool:
        """Write frames, and keep the rest. False if ``flush`` must follow."""
        self._outbox.send(self._sock, [memoryview(data)])
        return not self.unsent

    def flush(self) -> bool:
        """Write kept bytes. True if none are left. Reading finds a dead reader."""
        return self._outbox.flush(self._sock)

    def hear(self, take: Callable[[bytes], object]) -> str | None:
        """Give each arrived frame to ``take``. Returns why the other side must be ended: empty if
        it is gone, None if it is alive. Its fault is also an exception of ``take``. Never
        raises."""
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
        """The complete frames that have arrived, and the state of the other side after them."""
        frames, state, taken = list[bytes](), PeerState.OPEN, 0
        try:
            while state is PeerState.OPEN and taken <= self._largest:
                count = self._inbox.receive(self._sock)
                frames += self._inbox.whole()
                taken += count
                state = PeerState.OPEN if count else PeerState.CLOSED
                if self._inbox.broken:
                    state = PeerState.BROKEN
        except BlockingIOError:
            pass
        except OSError:
            state = PeerState.CLOSED
        return frames, state

    def close(self) -> None:
        self._sock.close()


_SIZES: Final = dict(
    zip(
        (0xC4, 0xC5, 0xC6, 0xC7, 0xC8, 0xC9, 0xD9, 0xDA, 0xDB),  # bytes, extensions, texts
        ((1, 0), (2, 0), (4, 0), (1, 1), (2, 1), (4, 1), (1, 0), (2, 0), (4, 0)),
        strict=True,
    )
)
"""The sizes of a length, and of the header after it."""
_FIXED: Final = dict(enumerate((4, 8, 1, 2, 4, 8, 1, 2, 4, 8, 2, 3, 5, 9, 17), start=0xCA))
"""Sizes of numbers, and of extensions of a fixed size."""
_HOLDERS: Final = {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}
"""The size of a count, and the values for each counted item."""


def check_values(data: bytes) -> None:
    """Walk a MessagePack value without decoding it, which may cost a hundred times its bytes.
    Raises ``ValueError`` for too many values, too deep nesting, or a key that is no plain value.
    The decoder handles a torn value."""
    at, left = 0, [(1, False)]
    for _ in range(MOST_VALUES):
        while left and not left[-1][0]:
            left.pop()
        if not left or at >= len(data):
            return
        count, keyed = left[-1]
        left[-1] = count - 1, keyed
        at, inside, pairs = _step(data, at)
        # Keys are hashed: a list becomes a tuple, and tuples can be made to collide.
        if inside and keyed and not count % 2:
            raise ValueError("it has a key that is a list or an object")
        if inside:
            left.append((inside, pairs))
            if len(left) > DEEPEST:
                raise ValueError(f"it is nested deeper than {DEEPEST} levels")
    raise ValueError(f"it has more than {MOST_VALUES} values")


def _step(data: bytes, at: int) -> tuple[int, int, bool]:
    """The place after a value's head and bytes, its count of inner values, and whether pairs."""
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
