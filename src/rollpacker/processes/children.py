"""Child processes that run a user's code, each with a socket to its driver.

Plain subprocesses rather than ``multiprocessing``'s, which would import the user's main module into
them, and each in a process group of its own, so that what it starts dies with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import socket
import subprocess
import sys
from typing import Protocol

from rollpacker.processes.shield import shielded

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_NAME = 15
_ATTEMPT = "ROLLMUX_ATTEMPT"


class Child(Protocol):
    """A process that was started: what ``Popen`` has, and ``Forked``."""

    @property
    def pid(self) -> int:
        """0 where there is none."""
        ...

    def poll(self) -> int | None:
        """Its exit code, or the signal that it died of, negative; None while it goes on."""
        ...

    def wait(self, timeout: float = ..., /) -> int:
        """The same, when it has ended."""
        ...

    def kill(self) -> None:
        """End it."""
        ...


def start_child(module: str) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a process that calls a module's ``main(descriptor, parent)``; our end of its socket."""
    ours, theirs = socket.socketpair()
    with theirs, shielded():
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; from {module} import main; "
            f"main({theirs.fileno()}, {os.getpid()})"
        )
        popen = subprocess.Popen(
            [sys.executable, "-c", code],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    return popen, ours


def keep_to_itself() -> None:
    """Nobody else of this user reads the memory and the environment of this process: programs of
    agents would find keys there. Root may still.

    Not under RollMux, whose agents find what is left of a program by its environment.
    """
    if sys.platform == "linux" and _ATTEMPT not in os.environ:
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0)


def open_as(name: str) -> None:
    """As a process begins: for a child forked off one that keeps to itself. It is listed by this
    name, since its command line is the other one's."""
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 1)
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode())


def kill_child(child: Child) -> str:
    """End a process and what it started, and say how it ended."""
    # A number is free once its process was waited for and its group is empty: a process that has
    # it then is a stranger.
    if child.pid and (child.poll() is None or not _exists(child.pid)):  # 0 would be our own group
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
    child.kill()
    code = child.wait()
    return f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError as error:
        return error.errno == errno.EPERM
    return True


def die_with(parent: int) -> None:
    """For the child: end when its driver does, even where the user's code hangs."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)
