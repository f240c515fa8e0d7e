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


def send(pids: list[int], number: int) -> None:
    """A signal to processes, of which some may have ended; their numbers may be others' by now."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except (ProcessLookupError, PermissionError):
            continue


def watch(source: int) -> None:
    """Follow what comes in on the file descriptor ``source`` until it is closed."""
    pids: list[int] = []
    stop_at: float | None = None
    pending = b""
    while True:
        left = None if stop_at is None else max(0.0, stop_at - time.monotonic())
        if not select.select([source], [], [], left)[0]:
            send(pids, signal.SIGSTOP)
            stop_at = None
            continue
        data = os.read(source, 65536)
        if not data:
            send(pids, signal.SIGKILL)
            return
        *lines, pending = (pending + data).split(b"\n")
        for told in map(json.loads, lines):
            pids, stop_at = told["pids"], told["stop_at"]
            if stop_at is None or stop_at > time.monotonic():
                send(pids, signal.SIGCONT)


if __name__ == "__main__":
    watch(sys.stdin.fileno())
