"""The sandbox: runs untrusted programs against tests, in a pool of fork servers."""

from __future__ import annotations

import os
import queue
import sys
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace

from rollpacker.sandbox.base import ProgramRunner
from rollpacker.sandbox.grading.decode import reveal
from rollpacker.sandbox.grading.grade import encode_job, judge
from rollpacker.sandbox.running import Execution, Stop, Zygote, ZygoteDiedError, execute
from rollpacker.sandbox.selftest import quick_check
from rollpacker.sandbox.types import (
    LEVELS,
    AssertTest,
    Level,
    Limits,
    SandboxUnavailableError,
    StoppedError,
    Test,
    TestResult,
)

_RETRIES = 2
_ALONE = 2
# Other load makes CPU seconds grow, so a program this near to its budget runs again, alone.
_MARGIN, _LEAST_MARGIN = 1.2, 1.1
# On a busy machine the watcher is late. An endless program must still stop within the margin.
_LATE_S = 0.02
# A fork server that does not start gives up by itself before this.
_START_S = 90.0


class Sandbox(ProgramRunner[Level]):
    """Runs programs on this machine. As many run at once as there are fork servers.

    Make it before the process loads anything secret, and close it.

    Args:
        level: ``strong`` (namespaces, seccomp, Landlock), ``standard`` (seccomp, Landlock) or
            ``basic`` (seccomp, nothing can be opened).
        allow_weaker: take the strongest weaker level if ``level`` does not work here.
        zygotes: number of fork servers.
        check: run some hostile programs first.

    Raises:
        SandboxUnavailableError: the level does not work here, or a hostile program escaped. From
            ``run``: fork servers cannot be started any more, the sandbox is closed (also during the
            run), or this process was forked from the one that made it.
        ValueError: an unknown level.
    """

    def __init__(
        self,
        level: Level = "standard",
        *,
        allow_weaker: bool = False,
        zygotes: int = 1,
        limits: Limits | None = None,
        check: bool = True,
    ) -> None:
        if level not in LEVELS or zygotes < 1:
            raise ValueError(
                f"a sandbox needs a level of {', '.join(LEVELS)} and zygotes >= 1, "
                f"got level={level!r} and zygotes={zygotes}"
            )
        self.limits = limits or Limits()
        self._closed = False
        self._pid = os.getpid()
        self._alone = threading.Lock()
        # Fork servers are killed when the thread that started them ends.
        self._starter = ThreadPoolExecutor(1, "sandbox")
        self._all: list[Zygote] = []
        self._free: queue.SimpleQueue[Zygote] = queue.SimpleQueue()
        try:
            self._all.append(self._starter.submit(_start, level, allow_weaker).result())
            self.level = self._all[0].level
            if self.level != level:
                warnings.warn(
                    f"the sandbox runs at level '{self.level}', not '{level}'", stacklevel=2
                )
            for _ in range(zygotes - 1):
                self._all.append(self._started())
            for zygote in self._all:
                self._free.put(zygote)
            if check:
                self._check()
        except BaseException:
            self.close()
            raise

    def _check(self) -> None:
        escaped = quick_check(self)
        if escaped:
            raise SandboxUnavailableError(
                f"sandbox level '{self.level}' does not hold on this machine: hostile programs "
                f"got through: {', '.join(escaped)}"
            )

    def _run(
        self,
        program: str,
        test: Test,
        timeout_s: float,
        stop: Stop | None,
        float_tolerance: float | None,
    ) -> TestResult:
        if stop is not None and stop():
            raise StoppedError
        job, stdin = encode_job(program, test)
        result: TestResult | None = None
        heavy = 0
        stretched = max(_LEAST_MARGIN * timeout_s, _MARGIN * timeout_s - _LATE_S)
        for _ in range(1 + _RETRIES):
            execution = self._execute(job, stdin, stretched, stop)
            if execution is None:
                continue
            near = execution.end == "exit" and execution.cpu_s > timeout_s
            for _ in range(_ALONE if near else 0):
                execution = self._execute(job, stdin, timeout_s, stop, alone=True)
                if execution is None or execution.end != "tle_cpu":
                    break
            if execution is not None:
                result = judge(test, execution, float_tolerance)
                if result.verdict != "infra":
                    return result
                heavy += execution.heavy
        if heavy > _RETRIES and result is not None:
            # Each time it held so much that the kernel chose it when memory was short.
            return replace(result, verdict="crash", detail="out of memory")
        return result or TestResult(
            verdict="infra", cpu_s=0.0, wall_s=0.0, detail="the fork server died"
        )

    def _is_forgeable(self, test: Test) -> bool:
        return isinstance(test, AssertTest) and reveal(test.asserts).forgeable

    def _execute(
        self, job: bytes, stdin: bytes, budget_s: float, stop: Stop | None, alone: bool = False
    ) -> Execution | None:
        self._demand_open()
        with self._zygotes(len(self._all) if alone else 1) as taken:
            try:
                return execute(taken[0], job, stdin, self.limits, budget_s, stop)
            except ZygoteDiedError:
                self._demand_open()
                self.deaths += 1
                taken[0] = self._replace(taken[0])
                return None
            except StoppedError:
                raise
            except BaseException:
                # Interrupted: a program may still run in this fork server.
                if not self._closed:
                    taken[0] = self._replace(taken[0])
                raise

    @contextmanager
    def _zygotes(self, count: int) -> Iterator[list[Zygote]]:
        taken: list[Zygote] = []
        try:
            # Two callers that each wait for all fork servers would wait for each other.
            with self._alone if count > 1 else nullcontext():
                for _ in range(count):
                    taken.append(self._free.get())
            yield taken
        finally:
            for zygote in taken:
                self._free.put(zygote)

    def _demand_open(self) -> None:
        if self._closed:
            raise SandboxUnavailableError("the sandbox is closed")
        # A forked process has the fork servers' sockets but not the thread that starts them.
        if os.getpid() != self._pid:
            raise SandboxUnavailableError(
                "a sandbox works only in the process that made it: make one after the fork"
            )

    def _started(self) -> Zygote:
        self._demand_open()
        try:
            starting = self._starter.submit(Zygote, self.level)
        except RuntimeError as error:
            self._demand_open()  # closed just now
            raise SandboxUnavailableError(f"no fork server can be started: {error}") from error
        longest_s = _START_S * len(self._all)
        try:
            return starting.result(longest_s)
        except TimeoutError as error:
            starting.cancel()
            starting.add_done_callback(_close_late)
            raise SandboxUnavailableError(f"no fork server started in {longest_s:g} s") from error

    def _replace(self, dead: Zygote) -> Zygote:
        dead.close()
        fresh = self._started()
        self._all[self._all.index(dead)] = fresh
        if self._closed:
            fresh.close()  # ``close`` may have run before this one was in the list
        self._demand_open()
        return fresh

    def cpu_s(self) -> float:
        """Return the CPU seconds of the fork servers themselves, without their children."""
        return sum(zygote.cpu_s for zygote in self._all)

    def close(self) -> None:
        """End the fork servers and their programs. A ``run`` of another thread raises."""
        self._closed = True
        for zygote in self._all:
            zygote.close()
        self._starter.shutdown()


def _close_late(starting: Future[Zygote]) -> None:
    if not starting.cancelled() and starting.exception() is None:
        starting.result().close()


def strongest_level() -> Level | None:
    """Return the strongest level that works and holds on this machine, or None if there is none."""
    for level in LEVELS:
        try:
            Sandbox(level).close()
        except SandboxUnavailableError:
            continue
        return level
    return None


def _start(level: Level, allow_weaker: bool) -> Zygote:
    if sys.platform != "linux":
        raise SandboxUnavailableError(f"the code sandbox needs Linux, this is {sys.platform}")
    weaker = LEVELS[LEVELS.index(level) :] if allow_weaker else (level,)
    for place, each in enumerate(weaker):
        try:
            return Zygote(each)
        except SandboxUnavailableError as error:
            if place == len(weaker) - 1:
                hint = "" if allow_weaker else ": choose a weaker level"
                raise SandboxUnavailableError(f"{error}{hint}") from error
    raise AssertionError("the last level returns or raises")
