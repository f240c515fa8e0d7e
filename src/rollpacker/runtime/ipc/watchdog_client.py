"""Starts the process that stops others when their time is over, and tells it until when."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress

from rollpacker.processes.children import shielded
from rollpacker.runtime.ipc import watchdog


class Watchdog:
    """Of processes on this machine; they are killed when whoever has made this is gone."""

    def __init__(self) -> None:
        with shielded():
            self._process = subprocess.Popen(
                [sys.executable, "-S", "-E", watchdog.__file__], stdin=subprocess.PIPE
            )

    def tell(self, pids: Sequence[int], stop_at: float | None) -> None:
        """They may run until then, in monotonic seconds; None is for processes that are idle.

        Raises ``BrokenPipeError`` when the guard has died.
        """
        assert self._process.stdin is not None
        told = {"pids": [pid for pid in pids if pid], "stop_at": stop_at}
        self._process.stdin.write(json.dumps(told).encode() + b"\n")
        self._process.stdin.flush()

    def dismiss(self) -> None:
        """Without a process to watch its end harms nobody."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has died
            self._process.stdin.write(b'{"pids": [], "stop_at": null}\n')
            self._process.stdin.close()
        self._process.wait()
