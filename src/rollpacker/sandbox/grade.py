"""From a test to a job, and from an execution to the test's result."""

from __future__ import annotations

import json
import marshal
import signal

from rollpacker.sandbox.compare import same_output, same_value
from rollpacker.sandbox.decode import FEW_MARKS, BadResultError, decode, most_marks, read_report
from rollpacker.sandbox.execution import Execution
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
        return job | {"kind": "asserts", "code": _text("a test's asserts", test.asserts)}, b""
    try:
        if isinstance(test.args, str):
            raise TypeError("expected a list, got text")
        args = json.dumps(list(test.args))
    except TypeError as error:
        raise ValueError(f"a test's arguments must be JSON values: {error}") from error
    return job | {"kind": "call", "call": _text("a test's call", test.call), "args": args}, b""


def _text(name: str, value: object) -> str:
    """The same as a ``str``: ``marshal`` takes no subclass, such as a member of an enumeration."""
    if not isinstance(value, str):
        raise ValueError(f"{name} must be text, got {type(value).__name__}")
    return str.__str__(value)


def encode_job(program: str, test: Test) -> tuple[bytes, bytes]:
    """A job for a child, which runs the same interpreter, and its input. Raises as ``job_of``."""
    job, stdin = job_of(program, test)
    return marshal.dumps(job), stdin


def judge(test: Test, execution: Execution) -> TestResult:
    """The verdict on one execution."""
    verdict, detail = _judge(test, execution)
    return TestResult(
        verdict=verdict,
        cpu_s=execution.cpu_s,
        wall_s=execution.wall_s,
        detail="".join(c if c.isprintable() else " " for c in detail[:_DETAIL]),
    )


def _judge(test: Test, execution: Execution) -> tuple[Outcome, str]:
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
        return ("pass", "") if same_output(found, test.stdout) else ("fail", "wrong output")
    return _judge_report(test, execution.result)


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


def _judge_report(test: CallTest | AssertTest, result: bytes) -> tuple[Outcome, str]:
    try:
        if isinstance(test, AssertTest):
            report = read_report(result, FEW_MARKS)
            return ("pass", "") if report.get("held") is True else ("fail", "no result")
        report = read_report(result, most_marks(test.expected))
        if "value" not in report:
            return "fail", "no result"
        found = decode(report["value"])
    except BadResultError as error:
        return "fail", str(error)
    return ("pass", "") if same_value(found, test.expected) else ("fail", "wrong value")
