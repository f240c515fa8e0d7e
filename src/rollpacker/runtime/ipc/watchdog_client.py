"""Starts the watchdog process, and gives it the end of a permit."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress

from rollpacker.processes.children import shielded
from rollpacker.runtime.ipc import watchdog


class Watchdog:
    """The watchdog of processes on this machine. It kills them when its own starter is gone."""

    def __init__(self) -> None:
        with shielded():
            self._process = subprocess.Popen(
                [sys.executable, "-S", "-E", watchdog.__file__], stdin=subprocess.PIPE
            )

    def tell(self, pids: Sequence[int], stop_at: float | None) -> None:
        """Let the processes run until ``stop_at`` (monotonic seconds). None is for idle ones.
        Raises ``BrokenPipeError`` if the watchdog has died."""
        assert self._process.stdin is not None
        told = {"pids": [pid for pid in pids if pid], "stop_at": stop_at}
        self._process.stdin.write(json.dumps(told).encode() + b"\n")
        self._process.stdin.flush()

    def dismiss(self) -> None:
        """End it. Without processes to watch, its end kills none."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has died
            self._process.stdin.write(b'{"pids": [], "stop_at": null}\n')
            self._process.stdin.close()
        self._process.wait()
