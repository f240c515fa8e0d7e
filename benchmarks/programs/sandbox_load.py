"""What the sandbox costs beside a bare subprocess, and whether verdicts hold on a busy machine.

    python -m benchmarks.programs.sandbox_load

Verdicts: honest programs that take 60% of their CPU budget, and endless ones, beside processes
that never sleep. The soak (thousands of programs, one in five hostile) is a slow test,
tests/sandbox/test_sandbox_soak.py.
"""

from __future__ import annotations

import json
import multiprocessing
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

from benchmarks._run import flags
from benchmarks.programs.sandbox_cost import measure
from rollpacker.sandbox import Sandbox, StdinTest

HONEST = """
total, count = 0, int(input())
for i in range(count):
    total += i
print(total)
"""
ENDLESS = "while True: pass\n"


def spin() -> None:
    """Never sleep."""
    while True:
        pass


def honest_test(count: int) -> StdinTest:
    """The test of ``HONEST``, which takes time by ``count``."""
    return StdinTest(stdin=f"{count}\n", stdout=f"{count * (count - 1) // 2}\n")


def busy(processes: int, honest: int, spinners: int, budget_s: float) -> dict[str, Any]:
    """Verdicts beside ``processes`` that never sleep."""
    load = [multiprocessing.Process(target=spin, daemon=True) for _ in range(processes)]
    with Sandbox("standard", zygotes=2) as sandbox, ThreadPoolExecutor(2) as threads:
        count = 1_000_000
        took = min(sandbox.run(HONEST, [honest_test(count)], 30.0).cpu_s for _ in range(5))
        test = honest_test(int(count * 0.6 * budget_s / took))
        for process in load:
            process.start()
        try:
            good = [threads.submit(sandbox.run, HONEST, [test], budget_s) for _ in range(honest)]
            bad = [threads.submit(sandbox.run, ENDLESS, [test], budget_s) for _ in range(spinners)]
            verdicts = [each.result() for each in good]
            endless = [each.result() for each in bad]
        finally:
            for process in load:
                process.kill()
    shares = sorted(verdict.cpu_s / budget_s for verdict in verdicts)
    return {
        "busy_processes": processes,
        "honest": honest,
        "honest_not_passed": sum(verdict.verdict != "pass" for verdict in verdicts),
        "honest_share_of_budget_p50_max": [shares[len(shares) // 2], shares[-1]],
        "spinners": spinners,
        "spinners_tle_cpu": sum(verdict.verdict == "tle_cpu" for verdict in endless),
        "spinners_worst_share_of_budget": max(verdict.cpu_s / budget_s for verdict in endless),
    }


def main() -> None:
    """Print both as JSON."""
    args = flags(
        __doc__,
        executions=(300, "of the cost"),
        zygotes=(1, "executions at once"),
        busy=(8, "processes that never sleep"),
        honest=200,
        spinners=20,
        budget_s=(0.25, "CPU seconds of a program"),
    ).parse_args()
    cost = asdict(measure("standard", args.executions, args.zygotes))
    print(json.dumps(cost | busy(args.busy, args.honest, args.spinners, args.budget_s), indent=1))


if __name__ == "__main__":
    main()
