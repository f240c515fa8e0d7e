"""Children that run a user's code, forked off one process that has imported what they need.

That is a fresh interpreter of one thread. It imports libraries, nothing of a user's, and is told
module names and nothing else: what a child reads and writes passes it by. What a fresh process
takes over from the driver it has taken over when it began: where that has changed since, another
one begins. Like a fresh process it ends with the thread that began it, and its children with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from rollpacker.processes.children import Child, die_with, keep_to_itself, start_child

_NUMBER = struct.Struct("<i")
"""What is told of a child: its process id, then how it ended, as ``Popen.returncode`` has it."""
_ANSWER_S = 60.0
"""After which a server that does not say that a killed child has ended is killed itself: one that
holds the memory of a device may take its time."""
_LIMITS = sorted(getattr(resource, each) for each in dir(resource) if each.startswith("RLIMIT_"))
_PR_SET_DUMPABLE, _PR_SET_NAME = 4, 15
_REQUEST = 1 << 16
_END = 3
"""A child's descriptor of its socket, behind the standard streams."""

_own = threading.local()


def fork_child(module: str, preload: Sequence[str] = ()) -> tuple[Child, socket.socket]:
    """As ``start_child``, for the time of a fork once the modules of ``preload`` are imported.

    Never waits. On other systems than Linux, whose libraries are not made to be forked, a fresh
    interpreter.
    """
    if sys.platform != "linux":
        return start_child(module)
    server: _Server | None = getattr(_own, "server", None)
    if server is None or not server.as_now():
        server = _own.server = _Server()
    ours, theirs = socket.socketpair()
    with theirs:
        return server.fork([module, *preload], theirs), ours


def _taken_over() -> tuple[Any, ...]:
    """What a process takes over from the one that starts it."""
    streams = [(number, _file(number)) for number in (1, 2)]
    limits = [resource.getrlimit(kind) for kind in _LIMITS]
    place = _file("."), sys.path[:], dict(os.environ)
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    return os.getpid(), place, streams, limits, cores, os.nice(0)


def _file(file: str | int) -> tuple[int, int] | None:
    """Which it is; None where it is not open."""
    with contextlib.suppress(OSError):
        found = os.stat(file)
        return found.st_dev, found.st_ino
    return None


class _Server:
    """The process that forks, as its driver sees it."""

    def __init__(self) -> None:
        self._taken_over = _taken_over()
        self._popen, self._control = start_child(__name__, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        # Where it is wanted no more: by then its children have ended, or their driver does.
        weakref.finalize(self, _end, self._popen, self._control, os.getpid())

    def as_now(self) -> bool:
        """Whether its children are what fresh processes would be now."""
        return self._taken_over == _taken_over() and self._popen.poll() is None

    def fork(self, modules: Sequence[str], end: socket.socket) -> Forked:
        """A child that calls the first module's ``main``; of a server that has just died, one that
        is dead."""
        ours, theirs = socket.socketpair()
        with theirs, contextlib.suppress(OSError):
            told = [json.dumps(modules).encode()]
            socket.send_fds(self._control, told, [end.fileno(), theirs.fileno()])
        return Forked(self, ours)

    def kill(self) -> None:
        """End it with all its children."""
        self._popen.kill()


def _end(popen: subprocess.Popen[bytes], control: socket.socket, driver: int) -> None:
    control.close()
    if os.getpid() == driver:  # and no fork of it
        popen.kill()
        popen.wait()


class Forked:
    """A forked child, with what ``Popen`` has of a fresh one. Its process id is its own until
    ``wait`` has returned.

    Args:
        server: that has forked it.
        line: to the server: tells of the child, and keeps it alive.
    """

    def __init__(self, server: _Server, line: socket.socket) -> None:
        self._server = server
        self._line = line
        self._told = b""
        self._over = False

    @property
    def pid(self) -> int:
        """0 where its server died before it was forked."""
        self._hear(_NUMBER.size, _ANSWER_S)
        return _NUMBER.unpack_from(self._told)[0] if len(self._told) >= _NUMBER.size else 0

    @property
    def returncode(self) -> int | None:
        """How it ended, as far as that was heard."""
        if len(self._told) == 2 * _NUMBER.size:
            return _NUMBER.unpack_from(self._told, _NUMBER.size)[0]
        return -signal.SIGKILL if self._over else None

    def poll(self) -> int | None:
        """How it ended; None while it has not."""
        self._hear(2 * _NUMBER.size, 0.0)
        return self.returncode

    def wait(self, timeout: float = 0.0) -> int:
        """Wait until it has ended, and let go of it: a server that does not say so in time is
        killed, and with it the child. ``timeout``: seconds; default: those of one that was killed.
        """
        self._hear(2 * _NUMBER.size, timeout or _ANSWER_S)
        with contextlib.suppress(OSError):
            self._line.shutdown(socket.SHUT_WR)  # a fork of the driver may hold a copy
        self._hear(2 * _NUMBER.size + 1, _ANSWER_S)  # its id is free when the line ends
        self._line.close()
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        """Kill it."""
        if self.poll() is None and self.pid:
            os.kill(self.pid, signal.SIGKILL)

    def _hear(self, size: int, timeout: float) -> None:
        """Until so many bytes have come, or none can; for 0 seconds, those that have come."""
        while len(self._told) < size and not self._over:
            self._line.settimeout(timeout)
            try:
                heard = self._line.recv(size - len(self._told))
            except (BlockingIOError, TimeoutError):
                if not timeout:
                    return
                self._server.kill()  # which ends the line
                continue
            except ConnectionResetError:
                heard = b""
            self._told += heard
            self._over = not heard


# The process itself -------------------------------------------------------------------------------


def main(descriptor: int, parent: int) -> None:
    """Fork children until the driver is gone; each of them returns from here like a program."""
    die_with(parent)
    keep_to_itself()
    gc.disable()  # collections would look through every library
    woken, wake = socket.socketpair()
    wake.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    server = os.getpid()
    child = _serve(socket.socket(fileno=descriptor), woken, wake)
    if child is not None:
        module, end = child
        import_module(module).main(end, server)


def _serve(
    control: socket.socket, woken: socket.socket, wake: socket.socket
) -> tuple[str, int] | None:
    """In a child: its module, and the descriptor of its socket."""
    held = dict[int, _Held]()
    while True:
        lines = [each.line for each in held.values() if not each.left]
        ready = select.select([control, woken, *lines], [], [])[0]
        if woken in ready:
            woken.recv(_REQUEST)
        held = {pid: each for pid, each in held.items() if not each.over(pid)}
        if control not in ready:
            continue
        request, descriptors, _, _ = socket.recv_fds(control, _REQUEST, 2)
        if not request:
            return None
        module, *preload = json.loads(request)
        _import(preload)
        end, line = (socket.socket(fileno=each) for each in descriptors)
        pid = _fork()
        if pid == 0:
            _become_child(end, [control, woken, wake, line, *(e.line for e in held.values())])
            _name(module)
            return module, _END
        end.close()
        if pid is None:
            line.close()
        else:
            held[pid] = _Held(line)
            held[pid].tell(pid)


def _fork() -> int | None:
    """None where the system has no room for another process: its driver sees its line end."""
    try:
        return os.fork()
    except OSError:
        return None


def _import(modules: Sequence[str]) -> None:
    new = [name for name in modules if name not in sys.modules]
    for name in new:
        with contextlib.suppress(Exception):  # it is the child's to say so
            import_module(name)
    if new:
        gc.collect()
        gc.freeze()


@dataclass(slots=True)
class _Held:
    """A child. ``told``: how it ended; ``left``: its driver has let go of it."""

    line: socket.socket
    told: bool = False
    left: bool = False

    def tell(self, number: int) -> None:
        with contextlib.suppress(OSError):
            self.line.send(_NUMBER.pack(number))

    def over(self, pid: int) -> bool:
        """Tell how it ended. Whether nobody holds it any more: until then its id is no other's."""
        ended = os.WEXITED | os.WNOHANG | os.WNOWAIT
        if not self.told and (found := os.waitid(os.P_PID, pid, ended)) is not None:
            self.told = True
            exited = found.si_code == os.CLD_EXITED
            self.tell(found.si_status if exited else -found.si_status)
        if not self.left and not self._wanted():
            self.left = True
            for kill in (os.killpg, os.kill):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    kill(pid, signal.SIGKILL)
        if not self.left or not os.waitpid(pid, os.WNOHANG)[0]:
            return False
        self.line.close()
        return True

    def _wanted(self) -> bool:
        try:
            return bool(self.line.recv(1, socket.MSG_DONTWAIT))
        except BlockingIOError:
            return True
        except OSError:
            return False


def _become_child(end: socket.socket, others: Sequence[socket.socket]) -> None:
    """Be as a fresh process is, but for what is imported."""
    os.setsid()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for each in others:
        each.detach()  # whoever frees it later must not close what has its number then
    os.dup2(end.detach(), _END)
    os.closerange(_END + 1, 1 << 16)
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 1)
    if "numpy.random" in sys.modules:  # the standard library's draws anew by itself
        sys.modules["numpy.random"].seed()
    gc.enable()


def _name(module: str) -> None:
    """As it is listed, since its command line is the server's."""
    name = module.removeprefix("rollpacker.").encode()
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name)
