"""The reward for programs: runs the response's code against the row's tests, in the sandbox."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from pydantic import Field

from rollpacker.config import CodeTimeoutConfig, Config, parse_as
from rollpacker.reward.base import NO_CODE, CodeRun, GradeRequest, GradingError, Scored
from rollpacker.reward.code.asserts import fault, wanted
from rollpacker.reward.code.blocks import choose, find_blocks, find_program
from rollpacker.sandbox import (
    AssertTest,
    CallTest,
    Level,
    Limits,
    RemoteSandbox,
    Sandbox,
    SandboxUnavailableError,
    StdinTest,
    StoppedError,
    Test,
    TestResult,
    Verdict,
    find_tests,
    float_tolerance,
    shorten,
)

# The report of reward ``code`` on a response: the program that it found, and each test's outcome.

_LONGEST = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class TestReport:
    """One test of a row. Each value is a line of at most a few hundred characters.

    Args:
        kind: ``stdin``, ``call`` or ``asserts``.
        given: the program's input, the call, or the asserts.
        expected: the right output or value, empty for asserts.
        found: the wrong output or value, empty if it was right.
    """

    __test__ = False

    kind: str
    given: str
    expected: str
    found: str
    verdict: str
    detail: str
    cpu_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeReport:
    """How a response to a row is graded.

    Args:
        score: None if the sandbox failed.
        program: its source, or None if the response has none.
        rule: the rule that found it, or why there is none.
        column: of the row, which the tests were read from.
        float_tolerance: how near floats had to be. None stands for 1e-6.
        tests: all of them, in order, none if there is no program.
    """

    score: float | None
    program: str | None
    rule: str
    column: str
    float_tolerance: float | None
    level: str
    tests: tuple[TestReport, ...]


def reports(tests: Sequence[Test], results: Sequence[TestResult]) -> tuple[TestReport, ...]:
    """Return the reports of tests with their results."""
    return tuple(_report(*each) for each in zip(tests, results, strict=True))


def _report(test: Test, result: TestResult) -> TestReport:
    match test:
        case StdinTest():
            kind, given, expected = "stdin", _text(test.stdin), _text(test.stdout)
        case CallTest():
            kind, expected = "call", shorten(test.expected)
            given = f"{test.call} with {shorten(test.args)}"
        case AssertTest():
            kind, given, expected = "asserts", _text(test.asserts), ""
    return TestReport(
        kind=kind,
        given=given,
        expected=expected,
        found=result.found,
        verdict=result.verdict,
        detail=result.detail,
        cpu_s=result.cpu_s,
    )


def _text(text: str) -> str:
    return repr(text[:_LONGEST]) + "..." * (len(text) > _LONGEST)


_LONGEST_S = CodeTimeoutConfig().most_s  # CPU seconds of a test without a timeout of its own
_NO_PROGRAM = "no complete fenced block of Python after </think>"
_NAME = re.compile(r"[A-Za-z_]\w*")


class CodeOptions(Config):
    """``options`` of reward ``code``."""

    remote: str | None = None
    """URL of a SandboxFusion-compatible service that runs the programs instead of this machine.
    Times are then wall seconds, and ``level`` and ``idle_s`` mean nothing."""
    remote_token_file: str | None = None
    """File with the bearer token for the service."""
    level: Level = "standard"
    """Isolation of the programs: ``strong``, ``standard`` or ``basic``."""
    allow_weaker: bool = False
    """Go on with a warning if only a weaker level works. Every record names the level."""
    partial_credit: bool = False
    """Score the share of tests that pass. Otherwise the score is 1 if all pass, and the first
    failure ends the run."""
    memory_mb: int = Field(default=1024, ge=128)
    """Address space of a program, MiB."""
    output_mb: int = Field(default=8, ge=1)
    """Output of a program, MiB."""
    idle_s: float = Field(default=10.0, gt=0)
    """A timeout of T CPU seconds may stretch to max(10 T, T + idle_s) seconds."""
    float_tolerance: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """How near a number must be to the expected one, absolute or relative, unless both are
    integers. A row's own column ``float_tolerance`` takes precedence. None: 1e-6, or the digits
    that the row gives. An expected integer must be printed as one."""


def read_options(options: Mapping[str, Any]) -> CodeOptions:
    """Raises ``ValueError`` with one line for the first mistake."""
    return parse_as(CodeOptions, dict(options), "rewards: options of 'code'")


class GraderHost(Protocol):
    """The services of a grading process for its rewards."""

    checked: bool

    def say(self, text: str) -> None: ...

    def unwanted(self) -> bool:
        """Return whether nobody waits for the running job any more. Asking is a sign of life."""
        ...


class _Alone:
    checked = False

    def say(self, text: str) -> None:
        warnings.warn(text, stacklevel=2)

    def unwanted(self) -> bool:
        return False


class CodeReward:
    """Grades programs in a sandbox of its own. Make it before the process loads anything secret.

    ``options``: as in ``CodeOptions``. Raises ``ValueError`` if one is wrong or this machine lacks
    the level.
    """

    def __init__(self, options: Mapping[str, Any], host: GraderHost | None = None) -> None:
        self._options = chosen = read_options(options)
        self._host = host or _Alone()
        self._deaths = 0
        limits = Limits(
            memory_mb=chosen.memory_mb, output_mb=chosen.output_mb, idle_s=chosen.idle_s
        )
        self._sandbox = _open(chosen, limits, check=not self._host.checked)
        if self._sandbox.level not in (chosen.level, "remote"):
            self._host.say(
                f"WARNING reward 'code': programs run at sandbox level "
                f"'{self._sandbox.level}', weaker than '{chosen.level}' (options.allow_weaker)"
            )

    def __call__(self, request: GradeRequest) -> Scored:
        """Return the score of one response. Raises ``GradingError`` if the program is not at
        fault."""
        blocks = find_blocks(request.text)
        if not blocks:
            return Scored(score=0.0, run=self._run(NO_CODE))
        _, tests, tolerance = self._tests(request.row)
        program = choose(blocks, _names(tests, request.row) if len(blocks) > 1 else ())
        timeouts = request.timeouts_s or (_LONGEST_S,) * len(tests)
        early = not self._options.partial_credit
        verdict = self._verdict(program.code, tests, timeouts, tolerance, stop_early=early)
        if verdict.verdict == "infra":
            detail = next(test.detail for test in verdict.tests if test.verdict == "infra")
            raise GradingError(f"the sandbox failed: {detail}")
        return Scored(
            score=self._score(verdict, len(tests)),
            run=self._run(verdict.verdict, verdict, timeouts),
        )

    def explain(self, request: GradeRequest) -> CodeReport:
        """Return how one response is graded, with all tests run. Raises ``GradingError`` like a
        call, except for verdicts ``infra``, which are in the report."""
        column, tests, tolerance = self._tests(request.row)
        report = CodeReport(
            score=0.0,
            program=None,
            rule=_NO_PROGRAM,
            column=column,
            float_tolerance=tolerance,
            level=self._sandbox.level,
            tests=(),
        )
        program = find_program(request.text, _names(tests, request.row))
        if program is None:
            return report
        timeouts = request.timeouts_s or (_LONGEST_S,) * len(tests)
        verdict = self._verdict(program.code, tests, timeouts, tolerance, stop_early=False)
        return replace(
            report,
            score=None if verdict.verdict == "infra" else self._score(verdict, len(tests)),
            program=program.code,
            rule=program.rule,
            tests=reports(tests, verdict.tests),
        )

    def _tests(self, row: Mapping[str, Any]) -> tuple[str, list[Test], float | None]:
        try:
            column, tests, tolerance = row_tests(row, remote=self._options.remote is not None)
        except ValueError as error:
            raise GradingError(f"the row's tests cannot be read: {error}") from error
        return column, tests, tolerance or self._options.float_tolerance

    def _verdict(
        self,
        program: str,
        tests: Sequence[Test],
        timeouts: Sequence[float],
        tolerance: float | None,
        stop_early: bool,
    ) -> Verdict:
        try:
            verdict = self._sandbox.run(
                program,
                tests,
                timeouts,
                stop_early=stop_early,
                stop=self._host.unwanted,
                float_tolerance=tolerance,
            )
        except (SandboxUnavailableError, StoppedError) as error:
            raise GradingError(str(error)) from error
        self._tell_deaths()
        return verdict

    def _score(self, verdict: Verdict, tests: int) -> float:
        if self._options.partial_credit:
            return verdict.passed / tests
        return float(verdict.verdict == "pass")

    def _run(
        self, outcome: str, verdict: Verdict | None = None, timeouts: Sequence[float] = (0.0,)
    ) -> CodeRun:
        tests = () if verdict is None else verdict.tests
        return CodeRun(
            verdict=outcome,
            tests=tuple(test.verdict for test in tests),
            cpu_s=tuple(round(test.cpu_s, 6) for test in tests),
            timeout_s=sum(timeouts) / len(timeouts),
            level=self._sandbox.level,
            forgeable=verdict is not None and verdict.forgeable,
        )

    def _tell_deaths(self) -> None:
        for _ in range(self._sandbox.deaths - self._deaths):
            self._host.say("a sandbox fork server died and was replaced")
        self._deaths = self._sandbox.deaths


def _names(tests: Sequence[Test], row: Mapping[str, Any]) -> set[str]:
    if isinstance(tests[0], CallTest):
        calls = {test.call for test in tests if isinstance(test, CallTest)}
        return {name for call in calls for name in call.split(".")}
    if isinstance(tests[0], StdinTest):
        return set()
    if entry := row.get("entry_point"):
        return set(_NAME.findall(str(entry)))
    asserts = (test.asserts for test in tests if isinstance(test, AssertTest))
    return {name for each in asserts for name in wanted(each)}


def row_tests(row: Mapping[str, Any], remote: bool) -> tuple[str, list[Test], float | None]:
    """Return the row's tests, the column that has them, and the tolerance that it names, or None.

    ``remote``: packages may be there. Raises ``ValueError``, one line, if tests cannot be read or
    run.
    """
    try:
        column, tests = find_tests(row)
        tolerance = float_tolerance(row)
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    _demand_runnable(column, tests, remote)
    return column, tests, tolerance


def _demand_runnable(column: str, tests: Sequence[Test], remote: bool) -> None:
    # Asserts that no program passes, or that any program passes, are the row's fault.
    for test in tests:
        if isinstance(test, AssertTest) and (why := fault(test.asserts, library_only=not remote)):
            raise ValueError(f"{column}: {why}")


def _open(options: CodeOptions, limits: Limits, check: bool) -> Sandbox | RemoteSandbox:
    headers = _credential(options.remote_token_file)
    try:
        if options.remote is not None:
            return RemoteSandbox(options.remote, headers=headers, limits=limits)
        with warnings.catch_warnings(action="ignore"):
            return Sandbox(
                options.level, allow_weaker=options.allow_weaker, limits=limits, check=check
            )
    except SandboxUnavailableError as error:
        raise ValueError(
            f"rewards: 'code': {error} (options.level, options.allow_weaker)"
        ) from error
    except ValueError as error:
        raise ValueError(f"rewards: 'code': {error} (options.remote)") from error


def _credential(file: str | None) -> dict[str, str]:
    # The header with the file's token. No error shows the token.
    if file is None:
        return {}
    try:
        token = Path(file).read_bytes().strip()
    except OSError as error:
        raise _bad_token_file(file, f"cannot be read: {error.strerror}") from error
    if not token:
        raise _bad_token_file(file, "is empty")
    if not all(0x21 <= byte <= 0x7E for byte in token):
        raise _bad_token_file(file, "holds no token: it has white space or is no printable ASCII")
    return {"Authorization": f"Bearer {token.decode('ascii')}"}


def _bad_token_file(file: str, problem: str) -> ValueError:
    return ValueError(f"rewards: 'code': {file} {problem} (options.remote_token_file)")
