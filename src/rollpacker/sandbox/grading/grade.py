"""From a test to a job, and from an execution to the test's result."""

from __future__ import annotations

import json
import marshal
import signal
from collections.abc import Mapping, Sequence

from rollpacker.sandbox.grading.compare import same_output, same_value
from rollpacker.sandbox.grading.decode import (
    FEW_MARKS,
    BadResultError,
    decode,
    most_marks,
    read_report,
    shorten,
)
from rollpacker.sandbox.grading.reveal import Demand, reveal
from rollpacker.sandbox.running.execution import Execution
from rollpacker.sandbox.types import (
    AssertTest,
    CallTest,
    Outcome,
    StdinTest,
    Test,
    TestResult,
)

_DETAIL = 300


def job_of(program: str, test: Test) -> tuple[dict[str, str], bytes]:
    """What goes in: the job and its standard input. What is expected never does.

    The arguments of a call are JSON text. Raises ``ValueError`` when they are no JSON, or when
    another part is no text.
    """
    job = {"program": _text("a program", program)}
    if isinstance(test, StdinTest):
        _text("a test's stdout", test.stdout)
        stdin = _text("a test's stdin", test.stdin)
        return job | {"kind": "stdin"}, stdin.encode("utf-8", "surrogatepass")
    if isinstance(test, AssertTest):
        asserts = _text("a test's asserts", test.asserts)
        job |= {"kind": "asserts", "code": reveal(asserts).code}
        if test.prompt:
            stub = _text("a test's stub", test.stub)
            job |= {"prompt": _text("a test's prompt", test.prompt), "stub": stub}
        return job, b""
    job |= {"kind": "call", "call": _text("a test's call", test.call), "args": _arguments(test)}
    if places := _number_keyed(test):
        job["number_keys"] = places
    if test.nodes:
        job["nodes"] = json.dumps(dict(test.nodes))
    return (job | {"in_place": "yes"} if test.in_place else job), b""


def _number_keyed(test: CallTest) -> str:
    """Places of the arguments that have integers as keys, which JSON has not."""
    if isinstance(test.args, Mapping):
        return ""
    keyed = [place for place, each in enumerate(test.args) if isinstance(each, dict) and each]
    whole = (place for place in keyed if all(type(key) is int for key in test.args[place]))
    return " ".join(map(str, whole))


def _arguments(test: CallTest) -> str:
    try:
        if isinstance(test.args, str):
            raise TypeError("expected a list, got text")
        by_name = isinstance(test.args, Mapping)
        return json.dumps(dict(test.args) if by_name else list(test.args))
    except TypeError as error:
        raise ValueError(f"a test's arguments must be JSON values: {error}") from error


def _text(name: str, value: object) -> str:
    """The same as a ``str``: ``marshal`` takes no subclass, such as a member of an enumeration."""
    if not isinstance(value, str):
        raise ValueError(f"{name} must be text, got {type(value).__name__}")
    return str.__str__(value)


def encode_job(program: str, test: Test) -> tuple[bytes, bytes]:
    """A job for a child, which runs the same interpreter, and its input. Raises as ``job_of``."""
    job, stdin = job_of(program, test)
    return marshal.dumps(job), stdin


def judge(test: Test, execution: Execution, float_tolerance: float | None = None) -> TestResult:
    """The verdict on one execution."""
    verdict, detail, *found = _judge(test, execution, float_tolerance)
    return TestResult(
        verdict=verdict,
        cpu_s=execution.cpu_s,
        wall_s=execution.wall_s,
        detail=_shown(detail),
        found="".join(map(_shown, found)),
    )


def _shown(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text[:_DETAIL])


_Judged = tuple[Outcome, str] | tuple[Outcome, str, str]


def _judge(test: Test, execution: Execution, tolerance: float | None) -> _Judged:
    match execution.end:
        case "tle_cpu" | "tle_idle":
            return execution.end, "time limit"
        case "starved":
            return "infra", "no core was free"
        case "no_start":
            return "infra", "the child failed: " + execution.stderr.decode("utf-8", "replace")
        case "signal":
            return _signalled(execution.code)
        case "exit":
            pass
    if execution.flooded:
        return "fail", "output limit"
    if execution.code != 0:
        error = _error(execution)
        failed = isinstance(test, AssertTest) and error.startswith("AssertionError")
        return "fail" if failed else "crash", error
    if isinstance(test, StdinTest):
        found = execution.stdout.decode("utf-8", "replace")
        if same_output(found, test.stdout, tolerance):
            return "pass", ""
        return "fail", "wrong output", repr(found[:_DETAIL])
    return _judge_report(test, execution.result, tolerance)


def _signalled(number: int) -> tuple[Outcome, str]:
    # A program cannot send it: the kernel was out of memory, or an operator was.
    if number == signal.SIGKILL:
        return "infra", "killed from outside"
    return "crash", signal.Signals(number).name


def _error(execution: Execution) -> str:
    try:
        return str(read_report(execution.result, FEW_MARKS).get("error", ""))
    except BadResultError:
        return f"exit status {execution.code}"


def _judge_report(test: CallTest | AssertTest, result: bytes, tolerance: float | None) -> _Judged:
    try:
        if isinstance(test, AssertTest):
            return _judge_asserts(reveal(test.asserts).checks, result)
        report = read_report(result, most_marks(test.expected))
        if "value" not in report:
            return "fail", "no result"
        found = decode(report["value"])
    except BadResultError as error:
        return "fail", str(error)
    right = [test.expected, [test.expected]] if test.or_list else [test.expected]
    if any(same_value(found, each, tolerance) for each in right):
        return "pass", ""
    return "fail", "wrong value", shorten(found)


def _judge_asserts(checks: Sequence[Demand], result: bytes) -> _Judged:
    report = read_report(result, 2 * most_marks([(0, check.expected) for check in checks]))
    found = decode(report.get("value"))
    if report.get("held") is not True or not isinstance(found, list):
        return "fail", "no result"
    missing = set(range(len(checks)))
    for each in found:
        match each:
            case (int(place), value) if 0 <= place < len(checks):
                missing.discard(place)
                if not checks[place].holds(value):
                    return "fail", f"wrong value: {checks[place].source}", shorten(value)
            case _:
                return "fail", "no result"
    return ("fail", "not all asserts were reached") if missing else ("pass", "")
