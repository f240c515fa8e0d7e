"""What the sandbox costs beside a bare subprocess, and whether verdicts hold on a busy machine.

    python -m benchmarks.programs.sandbox_load [--zygotes 2]

Cost: latency and CPU milliseconds of a short program, those of the trainer's process, the zygotes
and the children together, beside ``python -I -S -c program`` without a sandbox. Verdicts: honest
programs that take 60% of their CPU budget, and endless ones, beside processes that never sleep.
The soak (thousands of programs, one in five hostile) is tests/sandbox/test_sandbox_soak.py.
"""

from __future__ import annotations

import json
import multiprocessing
import resource
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from benchmarks._run import flags
from rollpacker.sandbox import Sandbox, StdinTest

SHORT = "a, b = map(int, input().split())\nprint(a + b)\n"
SHORT_TEST = StdinTest(stdin="20 22\n", stdout="42\n")
HONEST = """
total, count = 0, int(input())
for i in range(count):
    total += i
print(total)
"""
ENDLESS = "while True: pass\n"
WARM_UP, EXECUTIONS = 20, 300
BUSY, HONEST_RUNS, SPINNERS = 8, 200, 20
BUDGET_S = 0.25
"""CPU seconds of a program beside busy processes."""
EACH = 10
"""A bare subprocess after so many executions, so that both see the same machine."""


def cost(zygotes: int) -> dict[str, float]:
    """Of a short program, ``zygotes`` at once; the rate is by the wall clock, without the
    subprocesses."""
    block = EACH * zygotes
    latency: list[float] = []
    wall = cpu = bare = 0.0
    with Sandbox("standard", zygotes=zygotes) as sandbox, ThreadPoolExecutor(zygotes) as threads:

        def once(_: int) -> tuple[float, float]:
            began = time.perf_counter()
            verdict = sandbox.run(SHORT, [SHORT_TEST], 10.0)
            assert verdict.verdict == "pass", verdict
            return time.perf_counter() - began, verdict.cpu_s

        list(threads.map(once, range(WARM_UP * zygotes)))
        bare_cpu_s()
        for first in range(0, EXECUTIONS, block):
            cpu_began, began = time.process_time() + sandbox.cpu_s(), time.perf_counter()
            timed = np.array(list(threads.map(once, range(first, min(first + block, EXECUTIONS)))))
            wall += time.perf_counter() - began
            cpu += time.process_time() + sandbox.cpu_s() - cpu_began + timed[:, 1].sum()
            latency.extend(timed[:, 0])
            bare += bare_cpu_s()
    bare_ms, cpu_ms = bare / -(-EXECUTIONS // block) * 1e3, cpu / EXECUTIONS * 1e3
    p50, p99 = np.percentile(latency, [50, 99]) * 1e3
    return {
        "zygotes": zygotes,
        "executions_per_s": EXECUTIONS / wall,
        "p50_ms": float(p50),
        "p99_ms": float(p99),
        "cpu_ms_per_execution": float(cpu_ms),
        "cpu_ms_per_subprocess": bare_ms,
        "times_cheaper": float(bare_ms / cpu_ms),
    }


def bare_cpu_s() -> float:
    """CPU seconds of the program in a subprocess, without the imports of site."""

    def spent() -> float:
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        return time.process_time() + children.ru_utime + children.ru_stime

    began = spent()
    command = [sys.executable, "-I", "-S", "-c", SHORT]
    subprocess.run(command, input=SHORT_TEST.stdin.encode(), capture_output=True, check=True)
    return spent() - began


def spin() -> None:
    """Never sleep."""
    while True:
        pass


def honest_test(count: int) -> StdinTest:
    """The test of ``HONEST``, which takes time by ``count``."""
    return StdinTest(stdin=f"{count}\n", stdout=f"{count * (count - 1) // 2}\n")


def busy() -> dict[str, Any]:
    """Verdicts beside processes that never sleep."""
    load = [multiprocessing.Process(target=spin, daemon=True) for _ in range(BUSY)]
    with Sandbox("standard", zygotes=2) as sandbox, ThreadPoolExecutor(2) as threads:
        count = 1_000_000
        took = min(sandbox.run(HONEST, [honest_test(count)], 30.0).cpu_s for _ in range(5))
        test = honest_test(int(count * 0.6 * BUDGET_S / took))
        for process in load:
            process.start()
        try:
            good = [
                threads.submit(sandbox.run, HONEST, [test], BUDGET_S) for _ in range(HONEST_RUNS)
            ]
            bad = [threads.submit(sandbox.run, ENDLESS, [test], BUDGET_S) for _ in range(SPINNERS)]
            verdicts = [each.result() for each in good]
            endless = [each.result() for each in bad]
        finally:
            for process in load:
                process.kill()
    shares = sorted(verdict.cpu_s / BUDGET_S for verdict in verdicts)
    return {
        "busy_processes": BUSY,
        "honest": HONEST_RUNS,
        "honest_not_passed": sum(verdict.verdict != "pass" for verdict in verdicts),
        "honest_share_of_budget_p50_max": [shares[len(shares) // 2], shares[-1]],
        "spinners": SPINNERS,
        "spinners_tle_cpu": sum(verdict.verdict == "tle_cpu" for verdict in endless),
        "spinners_worst_share_of_budget": max(verdict.cpu_s / BUDGET_S for verdict in endless),
    }


def main() -> None:
    """Print both as JSON."""
    args = flags(__doc__, zygotes=(1, "executions at once")).parse_args()
    print(json.dumps(cost(args.zygotes) | busy(), indent=1))


if __name__ == "__main__":
    main()
