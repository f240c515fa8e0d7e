"""One execution: descriptors in, CPU and wall time watched from outside, bytes out."""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from rollpacker.sandbox.running.clock import ChildClock
from rollpacker.sandbox.running.zygote import Exit, Zygote, ZygoteDiedError
from rollpacker.sandbox.types import Limits, StoppedError

End = Literal["exit", "signal", "tle_cpu", "tle_idle", "starved", "no_start"]

Stop = Callable[[], bool]
"""Asked a few times a second while a program runs; true ends it."""

_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_STARVED = 10.0
_SHORTEST_S = 0.001
_ASK_S = 0.2
_KILL_S = 60.0
# Of its memory limit. What is killed while it holds more may have had itself killed.
_HEAVY = 0.5


@dataclass(frozen=True, slots=True)
class Execution:
    """What came of one execution.

    Args:
        end: how it ended; ``no_start`` when the program was never reached.
        code: exit status or signal.
        cpu_s: CPU seconds.
        wall_s: seconds.
        stdout: standard output.
        result: what the harness reported.
        stderr: standard error.
        flooded: whether an output was cut at its limit.
        heavy: whether it held more than half of its memory limit.
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
    """Run a job within ``budget_s`` CPU seconds.

    Raises ``ZygoteDiedError`` and ``StoppedError``.
    """
    output, memory = limits.output_mb << 20, limits.memory_mb << 20
    cap_s = limits.wall_cap(budget_s)
    # The kernel's own CPU limit counts ticks, and a program that is awake at each of them is said
    # to have run all the time: it must never be the first to kill, so it is out of reach.
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
    """Wait for the end of a child, and bring it about when a limit is reached."""
    began = time.monotonic()
    clock: ChildClock | None = None
    used, pause_s = 0.0, _SHORTEST_S
    longest_s = math.inf if stop is None else _ASK_S
    while True:
        # With one thread, it cannot use more CPU time than passes.
        exited = zygote.wait(max(min(budget_s - used, longest_s), pause_s))
        if exited is not None:
            return "exit", exited
        if stop is not None and stop():
            _kill(zygote, pidfd)
            raise StoppedError
        clock = clock or ChildClock(pidfd)
        now = clock.cpu_s() or used
        # One that sleeps just before the end of its budget must not be asked a thousand times
        # a second; that it is stopped a little late does not matter.
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
    # It may have ended just now, and may be stopped: only SIGKILL ends both.
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    exited = zygote.wait(_KILL_S)
    if exited is None:
        raise ZygoteDiedError
    return exited


@contextmanager
def _memory(flags: int = 0) -> Iterator[int]:
    """An empty file in memory; the child's file size limit bounds what it writes."""
    descriptor = os.memfd_create("sandbox", os.MFD_CLOEXEC | flags)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def _file(content: bytes) -> Iterator[int]:
    """A file in memory that nobody can write to any more."""
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
