"""Stops a job's processes when its lease runs out, even if the job's driver is stopped or dead.

A process of its own, in plain Python, and the only one that stops (SIGSTOP) and continues them, so
that the two cannot overtake each other. Its standard input gives one JSON object a line:
``{"pids": [...], "stop_at": s}``. Until ``stop_at``, monotonic seconds, the processes may run, then
they are stopped; None is for processes that are idle. When the input ends the driver is gone, and
they are killed.
"""

import json
import os
import select
import signal
import sys
import time
from contextlib import suppress


class Watched:
    """Processes that were told, each by a descriptor of its own: its number may be another's when
    it has ended."""

    def __init__(self) -> None:
        self._ends: dict[int, int] = {}

    def follow(self, pids: list[int]) -> None:
        """These from now on."""
        for pid in self._ends.keys() - set(pids):
            os.close(self._ends.pop(pid))
        for pid in set(pids) - self._ends.keys():
            with suppress(ProcessLookupError):
                self._ends[pid] = os.pidfd_open(pid)

    def send(self, number: int) -> None:
        """A signal to those that have not ended."""
        for end in self._ends.values():
            with suppress(ProcessLookupError, PermissionError):
                signal.pidfd_send_signal(end, number)


def watch(source: int) -> None:
    """Follow what comes in on the file descriptor ``source`` until it is closed."""
    watched = Watched()
    stop_at: float | None = None
    pending = b""
    while True:
        left = None if stop_at is None else max(0.0, stop_at - time.monotonic())
        if not select.select([source], [], [], left)[0]:
            watched.send(signal.SIGSTOP)
            stop_at = None
            continue
        data = os.read(source, 65536)
        if not data:
            watched.send(signal.SIGKILL)
            return
        *lines, pending = (pending + data).split(b"\n")
        for told in map(json.loads, lines):
            watched.follow(told["pids"])
            stop_at = told["stop_at"]
            if stop_at is None or stop_at > time.monotonic():
                watched.send(signal.SIGCONT)


if __name__ == "__main__":
    watch(sys.stdin.fileno())
