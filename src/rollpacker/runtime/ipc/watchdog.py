"""Stops a job's processes when their permit ends, even if the job's driver is stopped or dead.

It is a process of its own in plain Python. Only it stops (SIGSTOP) and continues them, so that the
two signals cannot overtake each other. Each line of its standard input is a JSON object ``{"pids":
[...], "stop_at": s}``. The processes may run until ``stop_at`` (monotonic seconds), and are then
stopped. None is for idle processes. If the input ends, the driver is gone and they are killed.
"""

import json
import os
import select
import signal
import sys
import time
from contextlib import suppress


def follow(ends: dict[int, int], pids: list[int]) -> None:
    """Watch only ``pids``, by descriptors: a number may be reused after its process has ended."""
    for pid in ends.keys() - set(pids):
        os.close(ends.pop(pid))
    for pid in set(pids) - ends.keys():
        with suppress(ProcessLookupError):
            ends[pid] = os.pidfd_open(pid)


def send(ends: dict[int, int], number: int) -> None:
    """Signal all that have not ended."""
    for end in ends.values():
        with suppress(ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(end, number)


def watch(source: int) -> None:
    """Follow the lines from the file descriptor ``source`` until it is closed."""
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
