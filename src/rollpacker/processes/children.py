"""Child processes that run a user's code, each with a socket to its driver.

Plain subprocesses rather than ``multiprocessing``'s, which would import the user's main module into
them, and each in a process group of its own, so that what it starts dies with it.
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

# A driver has an open file for each worker, an agent some.

_OTHERS = 256
"""That it opens besides, at most."""


def allow_files(count: int) -> None:
    """Let this process open so many more, if the system lets it open fewer by itself."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = len(os.listdir("/dev/fd")) + count + _OTHERS
    if soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


# Slurm and Kubernetes send their signals to every process of a job. The driver answers them; a
# child that died of one would look like a fault, and a program that died of one like a wrong
# answer.

OUTSIDE = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""What comes from outside; between driver and children messages count, and SIGKILL."""


@contextmanager
def shielded() -> Iterator[None]:
    """Processes started inside have these signals blocked from their first moment on.

    The driver gets those that come meanwhile when it is over, or at once by another of its threads.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, OUTSIDE)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def take_no_notice() -> None:
    """For a shielded process that runs a user's code: what that starts takes signals as usual.

    Blocked and ignored signals would be inherited, and ``terminate`` of a helper do nothing.
    """
    for number in OUTSIDE:
        signal.signal(number, _nothing)
    # Held over a fork: what hits the child before it is as usual must not be taken for nothing.
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

    def kill(self) -> None: ...


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
