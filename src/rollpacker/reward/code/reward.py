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
    """One test of a row, each value as a line of a few hundred characters at most.

    Args:
        kind: ``stdin``, ``call`` or ``asserts``.
        given: what the program was given to read, the call, or the asserts.
        expected: what it should have printed or returned; empty for asserts.
        found: what it printed or returned where that was wrong; else empty.
        verdict: as in ``TestResult``.
        detail: why it did not pass.
        cpu_s: CPU seconds that the program took.
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
        score: what the reward gives; None where the sandbox failed.
        program: its source; None where the response has none.
        rule: by which rule it was found, or why there is none.
        column: of the row, which the tests were read from.
        float_tolerance: how near floats had to be; None stands for 1e-6.
        level: the isolation that the program ran in.
        tests: all of them, in order; none where there is no program.
    """

    score: float | None
    program: str | None
    rule: str
    column: str
    float_tolerance: float | None
    level: str
    tests: tuple[TestReport, ...]


def reports(tests: Sequence[Test], results: Sequence[TestResult]) -> tuple[TestReport, ...]:
    """Those of tests with their results."""
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


_LONGEST_S = CodeTimeoutConfig().most_s
"""Of a test that nobody gave a timeout for."""
_NO_PROGRAM = "no complete fenced block of Python after </think>"
_NAME = re.compile(r"[A-Za-z_]\w*")


class CodeOptions(Config):
    """``options`` of reward ``code``."""

    remote: str | None = None
    """URL of a SandboxFusion-compatible service that runs the programs instead of the sandbox of
    this machine. Times are then wall seconds, and ``level`` and ``idle_s`` mean nothing."""
    remote_token_file: str | None = None
    """File with the bearer token that the service asks for."""
    level: Level = "standard"
    """Isolation of the programs: ``strong``, ``standard`` or ``basic``."""
    allow_weaker: bool = False
    """Go on with a warning where only a weaker level works; every record names the level."""
    partial_credit: bool = False
    """Score the share of tests that pass; otherwise 1 if all do, and the first failure ends it."""
    memory_mb: int = Field(default=1024, ge=128)
    """Address space of a program, MiB."""
    output_mb: int = Field(default=8, ge=1)
    """Output of a program, MiB."""
    idle_s: float = Field(default=10.0, gt=0)
    """A timeout of T CPU seconds may stretch to max(10 T, T + idle_s) seconds."""
    float_tolerance: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """How near a number must be to the expected one, absolute or relative, where they are not both
    integers; a row's own column ``float_tolerance`` goes before. None: 1e-6, or the digits that
    the row gives, and what is expected to be printed as an integer must be one."""


def read_options(options: Mapping[str, Any]) -> CodeOptions:
    """Raises ``ValueError`` with one line for the first mistake."""
    return parse_as(CodeOptions, dict(options), "rewards: options of 'code'")


class GraderHost(Protocol):
    """What a grading process offers its rewards."""

    checked: bool

    def say(self, text: str) -> None: ...

    def unwanted(self) -> bool:
        """Whether nobody waits for the running job any more; asking is a sign of life."""
        ...


class _Alone:
    checked = False

    def say(self, text: str) -> None:
        warnings.warn(text, stacklevel=2)

    def unwanted(self) -> bool:
        return False


class CodeReward:
    """Grades programs in a sandbox of its own. Make it before the process loads anything secret.

    Args:
        options: as in ``CodeOptions``.
        host: the process that it runs in, if that is a grading process.

    Raises ``ValueError`` when an option is wrong or this machine has not got the level.
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
        """The score of one response. Raises ``GradingError`` when no fault of the program."""
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
        """How one response is graded; all tests are run. Raises ``GradingError`` as a call does,
        but for verdicts ``infra``, which are in the report."""
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
        """The row's tests, the column that has them, and how near floats must be."""
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
            self._host.say("a sandbox zygote died and was replaced")
        self._deaths = self._sandbox.deaths


def _names(tests: Sequence[Test], row: Mapping[str, Any]) -> set[str]:
    """What a program must define one of for its tests, where they say it."""
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
    """The row's tests, the column that has them, and the tolerance that it names, if it does.

    Args:
        row: the data row.
        remote: they run elsewhere, where there may be packages.

    Raises ``ValueError``, one line, when they cannot be read or run.
    """
    try:
        column, tests = find_tests(row)
        tolerance = float_tolerance(row)
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    _demand_runnable(column, tests, remote)
    return column, tests, tolerance


def _demand_runnable(column: str, tests: Sequence[Test], remote: bool) -> None:
    """Asserts that fail whatever the program is, or that no program fails, are the row's fault."""
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
    """The header with the file's token, which no error shows."""
    if file is None:
        return {}
    try:
        token = Path(file).read_bytes().strip()
    except OSError as error:
        raise _bad_token_file(file, f"cannot be read: {error.strerror}") from error
    if not token:
        raise _bad_token_file(file, "is empty")
    if not all(0x21 <= byte <= 0x7E for byte in token):
        raise _bad_token_file(file, "is no token: white space inside, or no printable ASCII")
    return {"Authorization": f"Bearer {token.decode('ascii')}"}


def _bad_token_file(file: str, problem: str) -> ValueError:
    return ValueError(f"rewards: 'code': {file} {problem} (options.remote_token_file)")
