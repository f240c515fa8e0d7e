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


def follow(ends: dict[int, int], pids: list[int]) -> None:
    """Watch these only, each by a descriptor: its number may be another's when it has ended."""
    for pid in ends.keys() - set(pids):
        os.close(ends.pop(pid))
    for pid in set(pids) - ends.keys():
        with suppress(ProcessLookupError):
            ends[pid] = os.pidfd_open(pid)


def send(ends: dict[int, int], number: int) -> None:
    """A signal to those that have not ended."""
    for end in ends.values():
        with suppress(ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(end, number)


def watch(source: int) -> None:
    """Follow what comes in on the file descriptor ``source`` until it is closed."""
    ends: dict[int, int] = {}
    stop_at: float | None = None
    pending = b""
    while True:
        left = None if stop_at is None else max(0.0, stop_at - time.monotonic())
        if not select.select([source], [], [], left)[0]:
            send(ends, signal.SIGSTOP)
            stop_at = None
            continue
        data = os.read(source, 65536)
        if not data:
            send(ends, signal.SIGKILL)
            return
        *lines, pending = (pending + data).split(b"\n")
        for told in map(json.loads, lines):
            follow(ends, told["pids"])
            stop_at = told["stop_at"]
            if stop_at is None or stop_at > time.monotonic():
                send(ends, signal.SIGCONT)


if __name__ == "__main__":
    watch(sys.stdin.fileno())
