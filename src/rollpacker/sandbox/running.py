"""One execution of an untrusted program, from outside."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import select
import signal
import socket
import stat
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from rollpacker.processes.children import shielded
from rollpacker.sandbox.guest.zygote import EXIT, REQUEST
from rollpacker.sandbox.types import Level, Limits, SandboxUnavailableError, StoppedError

# The CPU time and waiting time of a child, read from outside.

_CPUCLOCK_SCHED = 2


class ChildClock:
    """The CPU time and waiting time of a process by its pidfd, all threads included."""

    def __init__(self, pidfd: int) -> None:
        self._poll = select.poll()
        self._poll.register(pidfd, select.POLLIN)
        self._pid = _pid(pidfd)

    def cpu_s(self) -> float | None:
        """Return the CPU seconds so far, or None if the process has ended."""
        if self._pid <= 0:
            return None
        try:
            # The kernel's numbering of the clocks of processes: clock_getcpuclockid(3).
            used = time.clock_gettime((~self._pid << 3) | _CPUCLOCK_SCHED)
        except OSError:
            return None
        return None if self._poll.poll(0) else used

    def waited_s(self) -> float:
        """Return the seconds spent ready to run without a core. 0 if the kernel does not report
        it."""
        try:
            fields = Path(f"/proc/{self._pid}/schedstat").read_text(encoding="ascii").split()
        except OSError:
            return 0.0
        return 0.0 if self._poll.poll(0) or len(fields) < 2 else int(fields[1]) / 1e9


def _pid(pidfd: int) -> int:
    for line in Path(f"/proc/self/fdinfo/{pidfd}").read_text(encoding="ascii").splitlines():
        if line.startswith("Pid:"):
            return int(line.split()[1])
    return -1


# The fork server as the trainer sees it: started, asked to fork, replaced when it dies.

_FOLDER = str(Path(__file__).parent)
_CODE = "import sys; sys.path.append({!r}); from guest.zygote import main; main()"
_START_S = 60.0
_UID = 61_804
# Without these some interpreters do not start.
_INTERPRETER = ("LD_LIBRARY_PATH", "PYTHONHOME")


class ZygoteDiedError(Exception):
    """The fork server is gone. Its program has no outcome."""


@dataclass(frozen=True, slots=True)
class Exit:
    """A child's wait status, its CPU seconds and its peak memory in bytes."""

    status: int
    cpu_s: float
    peak: int


class Zygote:
    """One fork server. It runs one child at a time, and ends with the thread that made it. Raises
    ``SandboxUnavailableError`` if this machine lacks the level."""

    def __init__(self, level: Level) -> None:
        self.level: Level = level
        self.cpu_s = 0.0
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, tempfile.TemporaryFile() as errors:
            with shielded():
                self._popen = _spawn(level, theirs.fileno(), errors)
            theirs.close()
            try:
                self._greet(errors)
            except BaseException:
                self.close()
                raise

    def _greet(self, errors: IO[bytes]) -> None:
        self._sock.settimeout(_START_S)
        try:
            reply = json.loads(self._sock.recv(4096) or b"null")
        except OSError as error:
            reply = {"error": f"the fork server did not start: {error}"}
        if reply is None:
            errors.seek(0)
            lines = errors.read().decode("utf-8", "replace").strip().splitlines()
            reply = {"error": f"the fork server ended: {' '.join(lines[-1:])}"}
        if "error" in reply:
            raise SandboxUnavailableError(
                f"sandbox level '{self.level}' does not work on this machine: {reply['error']}"
            )

    def fork(self, descriptors: Sequence[int], request: tuple[int, int, int, int]) -> int:
        """Start a child with these descriptors and the guest's ``REQUEST``. Return its pidfd, which
        the caller closes. Raises ``ZygoteDiedError``, also if the fork server does not answer."""
        try:
            socket.send_fds(self._sock, [REQUEST.pack(*request)], list(descriptors))
            reply, received, _, _ = socket.recv_fds(self._sock, 1, 1)
        except OSError as error:
            raise ZygoteDiedError from error
        if not reply or not received:
            raise ZygoteDiedError
        return received[0]

    def wait(self, seconds: float) -> Exit | None:
        """Return how the child ended, or None if not within ``seconds``. Raises
        ``ZygoteDiedError``."""
        poll = select.poll()
        try:
            poll.register(self._sock, select.POLLIN)
        except ValueError as error:  # closed by another thread
            raise ZygoteDiedError from error
        # Rounded up: a wait of 0 ms would spin.
        if not poll.poll(math.ceil(seconds * 1000.0)):
            return None
        try:
            reply = self._sock.recv(EXIT.size)
        except OSError as error:
            raise ZygoteDiedError from error
        if len(reply) < EXIT.size:
            raise ZygoteDiedError
        status, cpu_s, self.cpu_s, peak_kib = EXIT.unpack(reply)
        return Exit(status, cpu_s, peak_kib << 10)

    def close(self) -> None:
        self._sock.close()
        # When its socket closes, it kills its child and ends by itself.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(1.0)
        self._popen.kill()
        self._popen.wait()


def _spawn(level: Level, descriptor: int, errors: IO[bytes]) -> subprocess.Popen[bytes]:
    options = {
        "socket": descriptor,
        "level": level,
        "uid": _UID if _can_change_uid() else None,
        "folder": _FOLDER,
    }
    return subprocess.Popen(
        [
            *(sys.executable, "-s", "-S", "-P", "-B", "-X", "utf8"),
            *("-c", _CODE.format(_FOLDER), json.dumps(options)),
        ],
        pass_fds=[descriptor],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=errors,
        env=_clean_environment(),
        cwd="/",
        start_new_session=True,
    )


def _clean_environment() -> dict[str, str]:
    # A fixed seed, so that the order of a set is the same in each fork server.
    kept = {name: os.environ[name] for name in _INTERPRETER if name in os.environ}
    return {**kept, "PYTHONHASHSEED": "0", "LD_BIND_NOW": "1"}


def _can_change_uid() -> bool:
    # This must be root, and others must be able to read the standard library.
    if os.geteuid() != 0:
        return False
    library = Path(sysconfig.get_path("stdlib")).resolve()
    return all(folder.stat().st_mode & stat.S_IXOTH for folder in (library, *library.parents))


# One execution: descriptors in, CPU and wall time watched from outside, bytes out.

End = Literal["exit", "signal", "tle_cpu", "tle_idle", "starved", "no_start"]

Stop = Callable[[], bool]
"""Asked a few times a second while a program runs. True ends it."""

_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_STARVED = 10.0
_SHORTEST_S = 0.001
_ASK_S = 0.2
_KILL_S = 60.0
# Share of the memory limit. A program killed above it may have caused the kill itself.
_HEAVY = 0.5


@dataclass(frozen=True, slots=True)
class Execution:
    """The result of one execution.

    Args:
        end: how it ended. ``no_start``: the program was never reached.
        code: exit status or signal.
        result: the harness's report.
        flooded: an output was cut at its limit.
        heavy: it held more than half of its memory limit.
    """

    end: End
    code: int
    cpu_s: float
    wall_s: float
    stdout: bytes
    result: bytes
    stderr: bytes
    flooded: bool
    heavy: bool = False


def execute(
    zygote: Zygote,
    job: bytes,
    stdin: bytes,
    limits: Limits,
    budget_s: float,
    stop: Stop | None = None,
) -> Execution:
    """Run a job within ``budget_s`` CPU seconds. Raises ``ZygoteDiedError`` and
    ``StoppedError``."""
    output, memory = limits.output_mb << 20, limits.memory_mb << 20
    cap_s = limits.wall_cap(budget_s)
    # The kernel's own CPU limit counts ticks: a program awake at each of them counts as always
    # running. This limit is set far out of reach, so that ours is always first.
    request = (memory, math.ceil(_STARVED * cap_s + _KILL_S), output, len(job))
    with (
        _file(job) as job_fd,
        _file(stdin) as stdin_fd,
        _memory() as out,
        _memory() as err,
        _memory() as result,
    ):
        began = time.monotonic()
        pidfd = zygote.fork([job_fd, stdin_fd, out, err, result], request)
        try:
            end, exited = _watch(zygote, pidfd, cap_s, budget_s, stop)
        finally:
            os.close(pidfd)
        wall_s = time.monotonic() - began
        written = [_read(each, output) for each in (out, result, err)]
    if end == "exit":
        signalled = os.WIFSIGNALED(exited.status)
        end = "tle_cpu" if exited.cpu_s > budget_s else "signal" if signalled else "exit"
    if not written[1] and end in ("exit", "signal"):
        end = "no_start"
    code = os.waitstatus_to_exitcode(exited.status)
    flooded = any(len(each) >= output for each in written[:2])
    stdout, report, stderr = written
    heavy = exited.peak > _HEAVY * memory
    return Execution(
        end, abs(code), exited.cpu_s, wall_s, stdout, report[1:], stderr, flooded, heavy
    )


def _watch(
    zygote: Zygote, pidfd: int, cap_s: float, budget_s: float, stop: Stop | None
) -> tuple[End, Exit]:
    began = time.monotonic()
    clock: ChildClock | None = None
    used, pause_s = 0.0, _SHORTEST_S
    longest_s = math.inf if stop is None else _ASK_S
    while True:
        # A program with one thread cannot use more CPU time than wall time passes.
        exited = zygote.wait(max(min(budget_s - used, longest_s), pause_s))
        if exited is not None:
            return "exit", exited
        if stop is not None and stop():
            _kill(zygote, pidfd)
            raise StoppedError
        clock = clock or ChildClock(pidfd)
        now = clock.cpu_s() or used
        # A program that sleeps just before the end of its budget must not be polled a thousand
        # times a second. Stopping it a little late does no harm.
        pause_s = _SHORTEST_S if now - used > 0.5 * pause_s else min(2.0 * pause_s, _ASK_S)
        used = now
        wall = time.monotonic() - began
        reached = _limit_reached(used, budget_s, wall, clock, cap_s)
        if reached is not None:
            return reached, _kill(zygote, pidfd)


def _limit_reached(
    used: float, budget_s: float, wall: float, clock: ChildClock, cap_s: float
) -> End | None:
    if used > budget_s:
        return "tle_cpu"
    if wall <= cap_s:
        return None
    if wall - clock.waited_s() > cap_s:
        return "tle_idle"
    return "starved" if wall > _STARVED * cap_s else None


def _kill(zygote: Zygote, pidfd: int) -> Exit:
    # The child may have ended just now, or may be stopped: only SIGKILL ends a stopped one.
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    exited = zygote.wait(_KILL_S)
    if exited is None:
        raise ZygoteDiedError
    return exited


@contextmanager
def _memory(flags: int = 0) -> Iterator[int]:
    # An empty file in memory. The child's file size limit bounds it.
    descriptor = os.memfd_create("sandbox", os.MFD_CLOEXEC | flags)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def _file(content: bytes) -> Iterator[int]:
    # A sealed file in memory, read-only from now on.
    with _memory(os.MFD_ALLOW_SEALING) as descriptor:
        view = memoryview(content)
        while view:
            view = view[os.write(descriptor, view) :]
        os.lseek(descriptor, 0, os.SEEK_SET)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        yield descriptor


def _read(descriptor: int, most: int) -> bytes:
    size = min(os.fstat(descriptor).st_size, most)
    return os.pread(descriptor, size, 0) if size else b""
