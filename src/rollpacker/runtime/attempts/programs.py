"""What became of the programs of a step, as metrics."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rollpacker.reward.base import NO_CODE, CodeRun
from rollpacker.runtime.attempts.attempts import Trajectory


def program_metrics(attempts: Iterable[Trajectory]) -> dict[str, float]:
    """Of every response that a code reward graded, kept or not, as ``rewards/<name>/*``.

    Shares of responses: ``passed`` all tests, ``timeouts``, ``crashes``, ``no_code``. Share of the
    tests that were run: ``tests_passed``. CPU seconds: ``cpu_s`` of all programs together,
    ``timeout_s`` that a test was given on average.
    """
    runs: dict[str, list[CodeRun]] = {}
    for attempt in attempts:
        for name, run in attempt.runs.items():
            runs.setdefault(name, []).append(run)
    return {
        f"rewards/{name}/{what}": value
        for name in sorted(runs)
        for what, value in _metrics(runs[name]).items()
    }


def without_program(attempts: Iterable[Trajectory]) -> float:
    """Share of the responses that a code reward graded in which it found no program."""
    runs = [run for attempt in attempts for run in attempt.runs.values()]
    return sum(run.verdict == NO_CODE for run in runs) / len(runs) if runs else 0.0


def _metrics(runs: Sequence[CodeRun]) -> dict[str, float]:
    tests = [test for run in runs for test in run.tests]
    given = [run.timeout_s for run in runs if run.tests]

    def share(*verdicts: str) -> float:
        return sum(run.verdict in verdicts for run in runs) / len(runs)

    return {
        "passed": share("pass"),
        "timeouts": share("tle_cpu", "tle_idle"),
        "crashes": share("crash"),
        "no_code": share(NO_CODE),
        "tests_passed": sum(test == "pass" for test in tests) / len(tests) if tests else 0.0,
        "cpu_s": sum(seconds for run in runs for seconds in run.cpu_s),
        "timeout_s": sum(given) / len(given) if given else 0.0,
    }
