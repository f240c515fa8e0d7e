"""The end of what a program writes."""

from __future__ import annotations

import asyncio
import os
from typing import IO

_KEPT = 64 << 10
"""Bytes."""
_READ = 64 << 10


class OutputTail:
    """The end of what a program writes, all of which is read, so that it never waits.

    Attributes:
        text: the last bytes so far.
        ended: nothing more comes.
    """

    def __init__(self, pipe: IO[bytes]) -> None:
        self.text = b""
        self.ended = asyncio.Event()
        self._pipe = pipe
        self._loop = asyncio.get_running_loop()
        os.set_blocking(pipe.fileno(), False)
        self._loop.add_reader(pipe.fileno(), self._read)

    def close(self) -> None:
        """Read no more."""
        if not self._pipe.closed:
            self._loop.remove_reader(self._pipe.fileno())
            self._pipe.close()
            self.ended.set()

    def _read(self) -> None:
        try:
            data = os.read(self._pipe.fileno(), _READ)
        except BlockingIOError:
            return
        self.text = (self.text + data)[-_KEPT:]
        if not data:
            self.close()
