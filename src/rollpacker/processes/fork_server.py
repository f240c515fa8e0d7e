"""Children that run a user's code, forked off a process that has imported their modules.

That process is Python's own fork server. ``multiprocessing.Process`` would import the user's main
module, and train with it if it has no guard, so the server is used directly. Each child takes over
the driver's environment, folder, path, output and cores at its start.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import pickle
import select
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import forkserver, resource_tracker

from rollpacker.processes.children import Child, open_as, shielded, start_child

_ANSWER_S = 60.0
"""After so many seconds, a killed child counts as ended, even if its server is silent."""
_ROOM = 1 << 20
"""Bytes of the pipe to a child. An environment fits, so that the driver need not wait."""
_END = 3
"""A child's descriptor of its socket, after the standard streams."""
_servers: dict[tuple[str, ...], forkserver.ForkServer] = {}


def fork_child(module: str, preload: Sequence[str] = ()) -> tuple[Child, socket.socket]:
    """As ``start_child``, but forked after the first import of ``preload``'s modules. Libraries can
    be forked safely only on Linux, so other systems start a fresh interpreter."""
    if sys.platform != "linux":
        return start_child(module)
    key = (f"{os.getpid()}", *preload)
    if key not in _servers:
        _servers[key] = forkserver.ForkServer()
        _servers[key].set_forkserver_preload(["rollpacker.processes.forked_from", *preload])
    ours, theirs = socket.socketpair()
    resource_tracker.ensure_running()  # else the server starts it, which unblocks signals
    with theirs, shielded():
        line, told = _servers[key].connect_to_new_process([theirs.fileno(), 1, 2])
    with open(told, "wb") as pipe, contextlib.suppress(BrokenPipeError):
        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _ROOM)
        pickle.dump({}, pipe)  # the preparation data of ``multiprocessing``
        pickle.dump(_Begun.now(module), pipe)
    return Forked(line), ours


@dataclass(frozen=True, slots=True)
class _Begun:
    """The state of a child at its start, which the server runs."""

    module: str
    folder: str
    path: list[str]
    environment: dict[str, str]
    cores: set[int] | None

    @classmethod
    def now(cls, module: str) -> _Begun:
        cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
        return cls(module, os.getcwd(), sys.path[:], dict(os.environ), cores)

    def _bootstrap(self, _parent: int) -> int:
        os.setsid()
        # Close all others, the server's too: an open copy would keep the server alive.
        for end, number in zip(forkserver.get_inherited_fds() or (), (_END, 1, 2), strict=True):
            os.dup2(end, number)
        os.closerange(_END + 1, 1 << 16)
        resource_tracker._resource_tracker = resource_tracker.ResourceTracker()
        gc.freeze()  # a collection would touch, and so copy, the objects of every library
        open_as(self.module.removeprefix("rollpacker.").replace(".processes", ""))
        os.chdir(self.folder)
        os.environ.clear()
        os.environ.update(self.environment)
        if self.cores is not None:
            os.sched_setaffinity(0, self.cores)
        sys.path[:] = self.path
        if "numpy.random" in sys.modules:  # the standard library seeds itself anew
            sys.modules["numpy.random"].seed()
        try:
            import_module(self.module).main(_END, os.getppid())
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else int(end.code is not None)
        return 0


class Forked:
    """A forked child with ``Popen``'s interface. ``line`` yields its process id, then its end."""

    def __init__(self, line: int) -> None:
        self._line = line
        self._pid: int | None = None
        self.returncode: int | None = None

    @property
    def pid(self) -> int:
        """0 if the server died before the fork."""
        self._hear(_ANSWER_S, until_over=False)
        return self._pid or 0

    def poll(self) -> int | None:
        self._hear(0.0)
        return self.returncode

    def wait(self, timeout: float = _ANSWER_S) -> int:
        """Wait for the end. After ``timeout`` the child counts as killed."""
        self._hear(timeout)
        if self.returncode is None:
            self._over(-signal.SIGKILL)
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        if self.poll() is None and self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def _hear(self, timeout: float, *, until_over: bool = True) -> None:
        while self.returncode is None and (until_over or self._pid is None):
            if not select.select([self._line], [], [], timeout)[0]:
                return
            try:
                number = forkserver.read_signed(self._line)
            except (EOFError, OSError):
                self._over(-signal.SIGKILL)
                return
            if self._pid is None:
                self._pid = number
            else:
                self._over(number)

    def _over(self, code: int) -> None:
        self.returncode = code
        os.close(self._line)
