"""Ends the programs of a process of environments that was killed and could not end them itself.

Programs have process groups of their own, so a kill of that process does not reach them. A small
process holds their list, and ends them when the other side is gone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket

from rollpacker.processes.children import start_child


class Reaper:
    """The reaper's process, as the process of environments sees it."""

    def __init__(self) -> None:
        self._popen, self._sock = start_child("rollpacker.env.agent.reaper")

    def watch(self, group: int) -> None:
        self._say(group)

    def forget(self, group: int) -> None:
        self._say(-group)

    def close(self) -> None:
        self._sock.close()
        self._popen.wait()

    def _say(self, number: int) -> None:
        with contextlib.suppress(OSError):  # without the reaper, programs still run
            self._sock.sendall(b"%d\n" % number)


def main(descriptor: int, _parent: int) -> None:
    """Keep the list until the other side is gone, and end the groups on it."""
    groups: set[int] = set()
    gone = contextlib.suppress(ConnectionResetError)
    with gone, socket.socket(fileno=descriptor) as sock, sock.makefile("rb") as lines:
        for line in lines:
            number = int(line)
            if number > 0:
                groups.add(number)
            else:
                groups.discard(-number)
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
