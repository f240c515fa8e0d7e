"""From a test to a job, and from an execution to the test's result."""

from __future__ import annotations

import json
import marshal
import math
import re
import signal
from collections.abc import Mapping, Sequence
from decimal import Decimal
from itertools import repeat
from typing import Any

from rollpacker.sandbox.grading.decode import (
    FEW_MARKS,
    BadResultError,
    Demand,
    Pairs,
    SetMembers,
    decode,
    most_marks,
    read_report,
    reveal,
    shorten,
)
from rollpacker.sandbox.running import Execution
from rollpacker.sandbox.types import (
    FLOAT_TOLERANCE,
    AssertTest,
    CallTest,
    Outcome,
    StdinTest,
    Test,
    TestResult,
)

# Compares a program's results with the expected ones, in the trainer's process.

_LONGEST_NUMBER = 64
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,4})?")
_INTEGER = re.compile(r"[+-]?[0-9]+")
_WHOLE = re.compile(r"[+-]?[0-9]+\.0*")
# With so many digits, in all or after the point, a number may be a rounded one.
_ROUNDED = 5
# Floats represent every integer exactly up to here.
_EXACT = 2.0**53
# Bits of a key. Python writes such integers in decimals quickly.
_LONGEST_KEY = 2000
# Output longer than this is wrong without splitting it into lines.
_LONGER, _SLACK = 16, 1 << 16


def same_output(found: str, expected: str, tolerance: float | None = None) -> bool:
    """Return whether two texts are equal line by line, except for white space around words and
    blank lines after the first.

    An expected number with a point or an exponent may be missed by ``tolerance``, absolute or
    relative. None: 1e-6, or the token's digits if it has five. An expected integer needs that
    integer, possibly with zeros after a point, or within a given tolerance another number with a
    point or an exponent.
    """
    if len(found) > _LONGER * len(expected) + _SLACK:
        return False
    ours, theirs = _lines(found), _lines(expected)
    pairs = zip(ours, theirs, strict=False)
    return len(ours) == len(theirs) and all(a == b or _same_line(a, b, tolerance) for a, b in pairs)


def _lines(text: str) -> list[str]:
    first, *rest = text.rstrip().split("\n")
    return [first, *(line for line in rest if line.strip())]


def _same_line(found: str, expected: str, tolerance: float | None) -> bool:
    theirs = expected.split()
    ours = found.split(None, len(theirs))
    if len(ours) != len(theirs):
        return False
    pairs = zip(ours, theirs, strict=True)
    return all(a == b or _same_number(a, b, tolerance) for a, b in pairs)


def _same_number(found: str, expected: str, tolerance: float | None) -> bool:
    if max(len(found), len(expected)) > _LONGEST_NUMBER:
        return False
    if not (_NUMBER.fullmatch(found) and _NUMBER.fullmatch(expected)):
        return False
    if not _INTEGER.fullmatch(expected):
        return _near(float(found), float(expected), tolerance, expected)
    if _WHOLE.fullmatch(found) and Decimal(found) == Decimal(expected):
        return True
    if tolerance is None or _INTEGER.fullmatch(found):
        return False
    if Decimal(found) == Decimal(expected):
        return True
    # A float near a large integer is another integer.
    wanted = float(expected)
    return abs(wanted) < _EXACT and abs(float(found) - wanted) <= tolerance


def _near(found: float, expected: float, tolerance: float | None, text: str) -> bool:
    within = tolerance or FLOAT_TOLERANCE
    if math.isclose(found, expected, rel_tol=within, abs_tol=within):
        return True
    _, digits, exponent = Decimal(text).as_tuple()
    if tolerance or not isinstance(exponent, int) or exponent >= 0:
        return False
    off, half = abs(found - expected), 0.5 * 10.0**exponent
    if -exponent >= _ROUNDED:
        return off <= half
    return len(digits) >= _ROUNDED and off <= min(half, 1e-5 * abs(expected))


_SCALARS = (int, str, bool, bytes, type(None))


def same_value(found: Any, expected: Any, tolerance: float | None = None) -> bool:
    """Return whether a decoded value equals the expected one.

    Types must be equal, except that a tuple matches a list, and a number as a dict's key its text.
    Floats may differ as in ``same_output``. An integer may stand for a float, and a float for an
    integer that it equals exactly, as in the public harnesses. A boolean is no number.
    """
    if type(expected) is int and type(found) is float:
        return found == expected
    if type(expected) in _SCALARS:
        return type(found) is type(expected) and found == expected
    if isinstance(expected, list | tuple):
        return _same_list(found, expected, tolerance)
    if isinstance(expected, dict):
        return isinstance(found, dict | Pairs) and _same_dict(found, expected, tolerance)
    if isinstance(expected, set):
        return isinstance(found, set | SetMembers) and _same_set(found, expected)
    if type(expected) is not float or type(found) not in (int, float):
        return False
    return _same_float(found, expected, tolerance)


def _same_list(found: Any, expected: Sequence[Any], tolerance: float | None) -> bool:
    if not (type(found) is tuple or type(found) is type(expected)) or len(found) != len(expected):
        return False
    return all(map(same_value, found, expected, repeat(tolerance)))


def _same_float(found: float, expected: float, tolerance: float | None) -> bool:
    if isinstance(found, float) and math.isnan(expected):
        return math.isnan(found)
    try:
        return _near(float(found), expected, tolerance, repr(expected))
    except OverflowError:
        return False


def _same_dict(
    found: dict[Any, Any] | Pairs, expected: dict[Any, Any], tolerance: float | None
) -> bool:
    left = {_key(key): value for key, value in expected.items()}
    if not len(found) == len(expected) == len(left):
        return False
    for key, value in found.items():
        text = _key(key)
        if text not in left or not same_value(value, left.pop(text), tolerance):
            return False
    return True


def _key(key: Any) -> Any:
    # The key as JSON writes it, if it can. Numbers are never hashed as such: they may collide.
    if isinstance(key, str):
        return key
    if isinstance(key, bool):
        return "true" if key else "false"
    if isinstance(key, int) and key.bit_length() > _LONGEST_KEY:
        return _exact(key)  # its decimals would take too long
    return str(key) if isinstance(key, int | float) else _exact(key)


def _same_set(found: set[Any] | SetMembers, expected: set[Any]) -> bool:
    return len(found) == len(expected) and set(map(_exact, found)) == set(map(_exact, expected))


def _exact(value: Any) -> Any:
    if isinstance(value, tuple):
        return ("t", *map(_exact, value))
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return ("i", f"{value:x}") if isinstance(value, int) else ("f", value.hex())


_DETAIL = 300


def job_of(program: str, test: Test) -> tuple[dict[str, str], bytes]:
    """Return the job and its standard input. Expected values are never part of it.

    The arguments of a call are JSON text. Raises ``ValueError`` if they are no JSON, or if another
    part is no text.
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
    # ``marshal`` takes no subclass of ``str``, such as a member of an enumeration.
    if not isinstance(value, str):
        raise ValueError(f"{name} must be text, got {type(value).__name__}")
    return str.__str__(value)


def encode_job(program: str, test: Test) -> tuple[bytes, bytes]:
    """Return a job for a child, which runs the same interpreter, and its input. Raises as
    ``job_of``."""
    job, stdin = job_of(program, test)
    return marshal.dumps(job), stdin


def judge(test: Test, execution: Execution, float_tolerance: float | None = None) -> TestResult:
    """Return the verdict on one execution."""
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
    # A program cannot send SIGKILL: it came from the kernel, out of memory, or from an operator.
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
