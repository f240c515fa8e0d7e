"""Messages between the driver and a grading process: length-prefixed frames over a socket."""

from __future__ import annotations

import socket
import struct

HEADER = struct.Struct("<I")
JOB = struct.Struct("<Q")
LARGEST_REPLY = 1 << 20


class WireError(RuntimeError):
    """The other side wrote something that is no frame."""


def frame(payload: bytes) -> bytes:
    """The payload with its length in front."""
    return HEADER.pack(len(payload)) + payload


class Channel:
    """The driver's end: it never waits, neither to write nor to read."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
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
        self._unsent += data
        return self.flush()

    def flush(self) -> bool:
        """Write what is kept; true when nothing is left. A dead reader is noticed by reading."""
        try:
            while self._unsent:
                del self._unsent[: self._sock.send(self._unsent)]
        except BlockingIOError:
            return False
        except OSError:
            self._unsent.clear()
        return True

    def receive(self) -> tuple[list[bytes], bool]:
        """Complete frames that have arrived, and whether the other side is still there.

        Raises ``WireError`` on a frame that no grading process writes.
        """
        alive = True
        try:
            while data := self._sock.recv(1 << 16):
                self._unread += data
                if len(self._unread) > LARGEST_REPLY:
                    break
            else:
                alive = False
        except BlockingIOError:
            pass
        except OSError:
            alive = False
        return self._frames(), alive

    def _frames(self) -> list[bytes]:
        frames: list[bytes] = []
        start = 0
        while len(self._unread) - start >= HEADER.size:
            (length,) = HEADER.unpack_from(self._unread, start)
            if length > LARGEST_REPLY:
                raise WireError(f"a reply of {length} bytes")
            end = start + HEADER.size + length
            if end > len(self._unread):
                break
            frames.append(bytes(self._unread[start + HEADER.size : end]))
            start = end
        del self._unread[:start]
        return frames

    def close(self) -> None:
        """Close the socket."""
        self._sock.close()
