"""Keeps one program of a job: starts it, stops it, and freezes it while the node has no lease.

It is a process of its own in plain Python, so that agents may restart. Files in its folder:

- ``program.json`` (read): argv, folder, environment, stop_s, and lease (a path).
- ``log`` (written): the program's output.
- ``exit`` (written): its exit code, or 128 plus the signal number.
- ``stop`` (read): SIGTERM to the program, SIGKILL ``stop_s`` seconds later to the rest.
- ``kill`` asks for SIGKILL at once.

The lease file holds the monotonic time until which the node belongs to the cluster. After that time
nothing starts, and the program and its descendants are frozen. They continue when the lease is
extended, and are killed after ``GIVE_UP_S``.

All descendants carry ``MARK`` in their environment. After a keeper was killed, they are found by
it.
"""

import contextlib
import ctypes
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable

POLL_S = 0.1
GIVE_UP_S = 3600.0
"""Seconds after which frozen processes are killed, since they hold the node's memory."""
LOG_KEPT = 256 * 2**20
"""Bytes at the end of a log that stay on disk. The rest becomes a hole."""
NOT_STARTED = 127  # code of a program that could not be started, as in shells
MARK = "ROLLMUX_ATTEMPT"  # the variable that holds an attempt's folder
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_libc = ctypes.CDLL(None)


class ProgramSupervisor:
    """Supervises the program in ``folder``."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        with open(self._path("program.json"), encoding="utf-8") as file:
            self._told = json.load(file)
        self._frozen: set[int] = set()
        self._ours_until = 0.0  # the last lease that could be read
        self._asked_at: float | None = None
        self._hole_end = 0

    def _path(self, name: str) -> str:
        return os.path.join(self._folder, name)

    def run(self) -> None:
        # Orphans of the program become children of this process, which ends them too.
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        with open(self._path("log"), "ab") as log:
            while not (unwanted := self._unwanted()) and time.monotonic() > self._lease():
                time.sleep(POLL_S)
            if unwanted:
                self._over(128 + signal.SIGTERM)
                return
            try:
                program = subprocess.Popen(
                    self._told["argv"],
                    cwd=self._told["folder"] or None,
                    env=os.environ | self._told["environment"] | {MARK: self._folder},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    preexec_fn=_end_with_keeper,
                )
            except OSError as error:
                log.write(f"not started: {error}\n".encode())
                self._over(NOT_STARTED)
                return
        while (status := _reap(program.pid)) is None:
            self._look(program.pid)
            self._cap_log()
            time.sleep(POLL_S)
        while left := descendants():
            send(left, signal.SIGKILL)
            _reap(program.pid)
            time.sleep(POLL_S)
        code = os.waitstatus_to_exitcode(status)
        self._over(code if code >= 0 else 128 - code)

    def _unwanted(self) -> bool:
        asked = any(os.path.exists(self._path(name)) for name in ("stop", "kill"))
        return asked or not os.path.exists(self._path("program.json"))

    def _look(self, program: int) -> None:
        now = time.monotonic()
        if os.path.exists(self._path("kill")):
            send(descendants(), signal.SIGKILL)
            return
        if self._asked_at is None and os.path.exists(self._path("stop")):
            self._asked_at = now
            send([program], signal.SIGTERM)
        if self._asked_at is not None and now > self._asked_at + self._told["stop_s"]:
            send(descendants(), signal.SIGKILL)
            return
        over = now - self._lease()
        if over > GIVE_UP_S:
            send(descendants(), signal.SIGKILL)
        elif over > 0:
            self._freeze()
        elif self._frozen:
            send(self._frozen, signal.SIGCONT)
            self._frozen.clear()

    def _cap_log(self) -> None:
        """Free the disk space of old output. Positions in the log stay."""
        with contextlib.suppress(OSError), open(self._path("log"), "r+b") as log:
            end = os.fstat(log.fileno()).st_size - LOG_KEPT
            if end - self._hole_end < LOG_KEPT:
                return
            length = ctypes.c_longlong(end)
            how = _KEEP_SIZE | _PUNCH_HOLE
            if _libc.fallocate(log.fileno(), how, ctypes.c_longlong(0), length):
                os.ftruncate(log.fileno(), 0)  # a file system without holes
                end = 0
            self._hole_end = end

    def _lease(self) -> float:
        with (
            contextlib.suppress(OSError, ValueError),
            open(self._told["lease"], encoding="utf-8") as file,
        ):
            self._ours_until = float(file.read())
        return self._ours_until

    def _freeze(self) -> None:
        """Freeze all processes, except those that someone else has stopped."""
        going = [pid for pid, state in descendants().items() if state not in "TtZ"]
        self._frozen.update(going)
        send(going, signal.SIGSTOP)

    def _over(self, code: int) -> None:
        """Write the exit code, retrying while the disk is full: without it the program counts as
        killed."""
        while os.path.isdir(self._folder):
            with contextlib.suppress(OSError):
                with open(self._path("exit.new"), "w", encoding="utf-8") as file:
                    file.write(str(code))
                os.replace(self._path("exit.new"), self._path("exit"))
                return
            time.sleep(POLL_S)


def _end_with_keeper() -> None:
    """Kill the program with its keeper: nobody else would stop it or see its end."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def descendants() -> dict[int, str]:
    """All descendants of this process, with their states."""
    parents: dict[int, int] = {}
    states: dict[int, str] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", encoding="latin-1") as file:
            states[int(name)], parent = file.read().rpartition(")")[2].split()[:2]
            parents[int(name)] = int(parent)
    found: dict[int, str] = {}
    young = {os.getpid()}
    while young:
        young = {pid for pid, parent in parents.items() if parent in young and pid not in found}
        found |= {pid: states[pid] for pid in young}
    return found


def send(pids: Iterable[int], number: int) -> None:
    """Signal processes. Some may have ended, and another process may have their number."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def marked(folder: str) -> list[int]:
    """Processes of the attempt in ``folder``, whoever is their parent now."""
    mark = f"{MARK}={folder}".encode()
    found: list[int] = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        # Other users' environments cannot be read, and an ended process has none.
        with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:
            if mark in file.read().split(b"\0"):
                found.append(int(name))
    return found


def _reap(program: int) -> int | None:
    found = None
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == program:
                found = ended[1]
    return found


def main(folder: str) -> None:
    """Keep the program of ``folder``, unless a keeper already does or did."""
    lock = os.open(os.path.join(folder, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return
    if not any(os.path.exists(os.path.join(folder, name)) for name in ("log", "exit")):
        ProgramSupervisor(folder).run()


if __name__ == "__main__":
    main(sys.argv[1])
