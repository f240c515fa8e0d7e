"""What reward ``code`` made of a response: the program that it found, and each test's outcome."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollpacker.sandbox import AssertTest, CallTest, StdinTest, Test, TestResult, shorten

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
