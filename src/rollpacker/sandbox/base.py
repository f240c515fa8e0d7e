"""From tests to the verdict on a program, for local and remote sandboxes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, Literal, Self, TypeVar

from rollpacker.sandbox.running import Stop
from rollpacker.sandbox.types import Level, Outcome, Test, TestResult, Verdict

LONGEST_S = 86_400.0  # the longest timeout of a test, in CPU seconds

L = TypeVar("L", bound=Level | Literal["remote"])


class ProgramRunner(ABC, Generic[L]):
    """Runs programs that may be hostile. Verdicts are computed outside of them. Threads may share
    it."""

    level: L
    """The isolation of the programs."""
    deaths = 0
    """Fork servers that died and were replaced."""

    def run(
        self,
        program: str,
        tests: Sequence[Test],
        timeout_s: float | Sequence[float],
        *,
        stop_early: bool = False,
        stop: Stop | None = None,
        float_tolerance: float | None = None,
    ) -> Verdict:
        """Run a program against its tests, each in a process of its own.

        Args:
            program: Python source.
            tests: at least one.
            timeout_s: CPU seconds for each test, at most a day. A sequence has one for every test.
            stop_early: leave out the tests after the first that did not pass.
            stop: asked a few times a second while a program runs. True ends it.
            float_tolerance: how near numbers must be, absolute or relative, unless both are
                integers. None: 1e-6 or the expected number's digits, and integers in the output as
                they are.

        Raises:
            StoppedError: ``stop`` returned true.
            ValueError: no tests, a timeout out of range, or a part of a job that is no text or
                JSON.
            SandboxUnavailableError: see the class.
        """
        budgets = [timeout_s] * len(tests) if isinstance(timeout_s, int | float) else timeout_s
        if not tests or len(budgets) != len(tests) or not all(0 < t <= LONGEST_S for t in budgets):
            raise ValueError(
                f"a sandbox needs tests and timeout_s > 0 and at most {LONGEST_S:g}, one or as "
                f"many as tests, got {len(tests)} tests and timeout_s={timeout_s}"
            )
        results: list[TestResult] = []
        for test, budget_s in zip(tests, budgets, strict=True):
            result = self._run(program, test, budget_s, stop, float_tolerance)
            results.append(result)
            if stop_early and results[-1].verdict != "pass":
                break
        wrong: list[Outcome] = [each.verdict for each in results if each.verdict != "pass"]
        return Verdict(
            verdict="infra" if "infra" in wrong else wrong[0] if wrong else "pass",
            tests=tuple(results),
            level=self.level,
            cpu_s=sum(each.cpu_s for each in results),
            forgeable=any(map(self._is_forgeable, tests)),
        )

    @abstractmethod
    def _run(
        self,
        program: str,
        test: Test,
        timeout_s: float,
        stop: Stop | None,
        float_tolerance: float | None,
    ) -> TestResult:
        """One test."""

    @abstractmethod
    def _is_forgeable(self, test: Test) -> bool:
        """Whether it is judged where the program could change its outcome."""

    @abstractmethod
    def close(self) -> None:
        """Take no more programs."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
