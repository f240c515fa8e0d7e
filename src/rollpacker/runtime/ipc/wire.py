"""Messages as they go through a socket, and a worker's end of one, which waits."""

from __future__ import annotations

import io
import pickle
import socket
import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

HEAD = struct.Struct("<Q")
"""Before each message: its length."""


def encode(message: Any) -> memoryview:
    """A message as it goes through a socket, without its length.

    With the newest protocol, since an older one would copy every array twice, and without numpy's
    own way, which is Python code on both sides.
    """
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
    """A worker's end of a socket: sends and receives whole messages, and waits for both.

    One thread may receive while another one sends. Pickles into a process that is being started.
    """

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def send(self, obj: Any, /) -> None:
        """Send a message. Raises ``OSError`` when the other end is gone."""
        data = encode(obj)
        head = HEAD.pack(len(data))
        sent = self._end.sendmsg([head, data])
        if sent < HEAD.size:
            self._end.sendall(head[sent:])
        if sent < HEAD.size + len(data):
            self._end.sendall(data[max(0, sent - HEAD.size) :])

    def recv(self) -> Any:
        """Wait for the next message. Raises ``EOFError`` or ``OSError`` when the other end is
        gone."""
        return pickle.loads(self.message())

    def message(self) -> bytearray:
        """The same, not unpacked."""
        return self._exactly(HEAD.unpack(self._exactly(HEAD.size))[0])

    def fileno(self) -> int:
        """Readable when a message, or the end, has come."""
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
        """Say no more."""
        self._end.close()
