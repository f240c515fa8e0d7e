"""How fast executions are, and what they cost beside a bare subprocess."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from rollpacker.sandbox.sandbox import Sandbox
from rollpacker.sandbox.types import Level, StdinTest

_PROGRAM = "a, b = map(int, input().split())\nprint(a + b)\n"
_TEST = StdinTest(stdin="20 22\n", stdout="42\n")
_WARM_UP = 20
# A bare subprocess after so many executions, so that both see the same machine.
_EACH = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Speed of executions.

    Args:
        level: of the sandbox.
        zygotes: executions at once.
        executions_per_s: by the wall clock, subprocesses left out.
        p50_ms: median latency.
        p99_ms: its 99th percentile.
        cpu_ms_per_execution: of the trainer's process, the zygotes and the children together.
        cpu_ms_per_subprocess: of ``python -I -S -c program`` and of its parent, without any
            sandbox.
        times_cheaper: than the subprocess.
    """

    level: Level
    zygotes: int
    executions_per_s: float
    p50_ms: float
    p99_ms: float
    cpu_ms_per_execution: float
    cpu_ms_per_subprocess: float
    times_cheaper: float


def measure(level: Level, executions: int, zygotes: int = 0) -> Measured:
    """Time a short program. ``zygotes`` 0 takes one per core. Raises as ``Sandbox``."""
    if executions < 1 or zygotes < 0:
        raise ValueError(
            f"a benchmark needs executions >= 1 and zygotes >= 0, got {executions} and {zygotes}"
        )
    zygotes = zygotes or os.cpu_count() or 1
    block = _EACH * zygotes
    latency: list[float] = []
    wall = cpu = bare = 0.0
    with Sandbox(level, zygotes=zygotes) as sandbox, ThreadPoolExecutor(zygotes) as threads:

        def once(_: int) -> tuple[float, float]:
            began = time.perf_counter()
            verdict = sandbox.run(_PROGRAM, [_TEST], 10.0)
            if verdict.verdict != "pass":
                raise RuntimeError(f"the benchmark's program got '{verdict.verdict}'")
            return time.perf_counter() - began, verdict.cpu_s

        list(threads.map(once, range(_WARM_UP * zygotes)))
        _bare_cpu_s()
        for first in range(0, executions, block):
            cpu_began, began = time.process_time() + sandbox.cpu_s(), time.perf_counter()
            timed = np.array(list(threads.map(once, range(first, min(first + block, executions)))))
            wall += time.perf_counter() - began
            cpu += time.process_time() + sandbox.cpu_s() - cpu_began + timed[:, 1].sum()
            latency.extend(timed[:, 0])
            bare += _bare_cpu_s()
    bare_ms, cpu_ms = bare / -(-executions // block) * 1e3, cpu / executions * 1e3
    p50, p99 = np.percentile(latency, [50, 99]) * 1e3
    return Measured(
        level=level,
        zygotes=zygotes,
        executions_per_s=executions / wall,
        p50_ms=float(p50),
        p99_ms=float(p99),
        cpu_ms_per_execution=float(cpu_ms),
        cpu_ms_per_subprocess=bare_ms,
        times_cheaper=float(bare_ms / cpu_ms),
    )


def _bare_cpu_s() -> float:
    """CPU seconds of the program in a subprocess, without the imports of site."""
    began = time.process_time() + _children_s()
    command = [sys.executable, "-I", "-S", "-c", _PROGRAM]
    subprocess.run(command, input=_TEST.stdin.encode(), capture_output=True, check=True)
    return time.process_time() + _children_s() - began


def _children_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
