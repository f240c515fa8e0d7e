"""Child processes that run a user's code, each with a socket to its driver.

They are plain subprocesses, as ``multiprocessing`` would import the user's main module into them.
Each has its own process group, so that its own children die with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

_OTHERS = 256
"""At most so many files are open besides those of workers or agents."""


def allow_files(count: int) -> None:
    """Allow ``count`` more open files, if the soft limit is too low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = len(os.listdir("/dev/fd")) + count + _OTHERS
    if soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


# Slurm and Kubernetes signal every process of a job, and the driver answers. If a child died of
# such a signal, it would look like a fault, and a dead program like a wrong answer.

OUTSIDE = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals from outside. The driver and its children use messages and SIGKILL."""


@contextmanager
def shielded() -> Iterator[None]:
    """Block these signals in processes started inside. The driver gets its own at the end."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, OUTSIDE)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def take_no_notice() -> None:
    """For a shielded process that runs a user's code: its children take signals as usual. Otherwise
    ``terminate`` of a helper would do nothing."""
    for number in OUTSIDE:
        signal.signal(number, _nothing)
    # Block signals over a fork: the child must not lose one before its handlers are the defaults.
    os.register_at_fork(before=_hold, after_in_parent=_let_go, after_in_child=_as_usual)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, OUTSIDE)


def _nothing(_number: int, _frame: object) -> None:
    """A handler, not ``SIG_IGN``: ``exec`` puts the default back."""


_held: list[set[int]] = []


def _hold() -> None:
    _held.append({int(n) for n in signal.pthread_sigmask(signal.SIG_BLOCK, OUTSIDE)})


def _let_go() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _held.pop())


def _as_usual() -> None:
    for number in OUTSIDE:
        if signal.getsignal(number) is _nothing:
            default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, default)
    _let_go()


_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_NAME = 15
_ATTEMPT = "ROLLMUX_ATTEMPT"


class Child(Protocol):
    """A started process: ``Popen`` or ``Forked``."""

    @property
    def pid(self) -> int:
        """0 if there is none."""
        ...

    def poll(self) -> int | None:
        """The exit code, or a negative signal number. None while it runs."""
        ...

    def wait(self, timeout: float = ..., /) -> int:
        """Wait for the end, and return the same."""
        ...

    def kill(self) -> None: ...


def start_child(module: str) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a process that calls a module's ``main(descriptor, parent)``, and return our socket."""
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
    """Hide this process's memory and environment, which may hold keys, from this user's programs.
    Not under RollMux, whose agents find a program's leftovers by their environment."""
    if sys.platform == "linux" and _ATTEMPT not in os.environ:
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0)


def open_as(name: str) -> None:
    """At the start of a hidden process's child: make it readable, listed under ``name``."""
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 1)
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode())


def kill_child(child: Child) -> str:
    """End a process and its group, and return how it ended."""
    # A number is free when its process was waited for and its group is empty. Then it may belong to
    # a stranger.
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
    """For a child: end when the driver does, even if the user's code hangs."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)
