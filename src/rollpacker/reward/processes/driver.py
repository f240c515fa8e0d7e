"""The driver as a grading process sees it: jobs come in, replies and signs of life go out."""

from __future__ import annotations

import select
import socket
import time
from collections import deque
from typing import Any

from rollpacker.core.codec import dumps
from rollpacker.processes.frames import HEADER, LARGEST_REPLY, Inbox, frame
from rollpacker.reward.base import GradingError
from rollpacker.reward.processes.process import JOB

_BEAT_S = 0.5


class Driver:
    """The other end of the socket. A job is a frame that begins with its number; one that holds
    nothing else cancels the job of that number."""

    def __init__(self, sock: socket.socket) -> None:
        self.checked = False
        """Whether another process has found its sandbox to hold on this machine."""
        self._sock = sock
        self._inbox = Inbox(HEADER, bytes)
        self._waiting: deque[bytes] = deque()
        self._cancelled: set[int] = set()
        self._running = -1
        self._beat = 0.0

    def next(self) -> bytes | None:
        """Wait for the next frame that is no cancellation; None when the driver is gone."""
        while not self._waiting:
            if not self._receive():
                return None
        return self._waiting.popleft()

    def reply(self, message: dict[str, Any]) -> None:
        """Write one message. Raises ``GradingError`` when it is larger than the driver reads."""
        text = dumps(message)
        if len(text) > LARGEST_REPLY:
            raise GradingError(f"logged more than {LARGEST_REPLY >> 20} MiB in one call")
        self._sock.sendall(frame(text))

    def say(self, text: str) -> None:
        """Tell the user."""
        self.reply({"say": text})

    def begin(self, job: int) -> None:
        """A job is running from now on; what was cancelled before it is over."""
        self._running = job
        self._beat = time.monotonic()

    def unwanted(self) -> bool:
        """Whether the running job was cancelled. Tells the driver now and then that it runs."""
        now = time.monotonic()
        if now - self._beat > _BEAT_S:
            self._beat = now
            self.reply({"beat": self._running})
        while select.select([self._sock], [], [], 0)[0]:
            if not self._receive():
                return True
        return self._running in self._cancelled

    def _receive(self) -> bool:
        try:
            count = self._inbox.receive(self._sock)
        except ConnectionResetError:  # it is gone and has not read everything
            count = 0
        for payload in self._inbox.whole():
            self._take(payload)
        return bool(count)

    def _take(self, payload: bytes) -> None:
        if len(payload) == JOB.size:
            self._cancelled = {JOB.unpack(payload)[0]}
        else:
            self._waiting.append(payload)
