"""Tests from rows of the datasets that people have.

Nothing is unpickled: rows that hold pickles are refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollpacker.sandbox.types import AssertTest, CallTest, StdinTest, Test, parse_test

Row = Mapping[str, Any]

_CALLS = ("functional", "function_call")


def read_tests(row: Row) -> list[Test]:
    """The tests of a row, by its columns. Raises ``ValueError`` when it has none that are known.

    Known are ``tests`` (a list of this package's own objects; DeepCoder), ``input_output`` (TACO,
    APPS), ``public_test_cases`` with ``private_test_cases`` (LiveCodeBench), ``verification_info``
    (SYNTHETIC-1), ``test_list`` (MBPP), ``test`` or ``test_code`` (KodCode, HumanEval), and an
    ``answer`` that is like ``input_output`` or ``tests`` (verl, PRIME). JSON may be given as text.
    """
    for column, read in _READERS.items():
        if row.get(column) and (tests := read(column, row)):
            return tests
    raise ValueError(
        f"a row has no tests: expected one of the columns {', '.join(_READERS)}, "
        f"got {', '.join(sorted(row))}"
    )


def _any(column: str, row: Row) -> list[Test]:
    data = _json(column, row[column])
    if not isinstance(data, list) or column == "input_output":
        return _pairs(column, data)
    return [_case(each, {}) if "input" in each else parse_test(each) for each in data]


def _pairs(column: str, data: Any) -> list[Test]:
    if not isinstance(data, dict) or not {"inputs", "outputs"} <= set(data):
        raise ValueError(f"{column}: expected 'inputs' and 'outputs'")
    inputs, outputs, name = data["inputs"], data["outputs"], data.get("fn_name")
    if len(inputs) != len(outputs):
        raise ValueError(f"{column}: {len(inputs)} inputs and {len(outputs)} outputs")
    pairs = list(zip(inputs, outputs, strict=True))
    if not name:
        return [StdinTest(stdin=_text(given), stdout=_text(wanted)) for given, wanted in pairs]
    # APPS and TACO put each result into a list of its own.
    wrapped = all(isinstance(each, list) and len(each) == 1 for each in outputs)
    return [
        CallTest(call=name, args=_args(column, given), expected=wanted[0] if wrapped else wanted)
        for given, wanted in pairs
    ]


def _args(column: str, given: Any) -> list[Any]:
    """The arguments of a call; as text, one a line."""
    if isinstance(given, str):
        return [_json(column, line) for line in given.splitlines() if line.strip()]
    if not isinstance(given, list):
        raise ValueError(f"{column}: the input of a call must be a list, got {given!r:.60}")
    return given


def _live_code_bench(_: str, row: Row) -> list[Test]:
    cases: list[Any] = []
    for column in ("public_test_cases", "private_test_cases"):
        if row.get(column):
            cases += _live_cases(column, row[column])
    metadata = _json("metadata", row.get("metadata") or "{}")
    return [_case(case, metadata) for case in cases]


def _live_cases(column: str, value: Any) -> Any:
    if isinstance(value, str) and not value.lstrip().startswith("["):
        raise ValueError(
            f"{column}: a pickle (in base64 and zlib), which can run code when it is loaded and "
            "is refused here: where you trust the dataset, replace the column once by the JSON "
            "text pickle.loads(zlib.decompress(base64.b64decode(value)))"
        )
    return _json(column, value)


def _case(case: Mapping[str, Any], metadata: Mapping[str, Any]) -> Test:
    """LiveCodeBench's case, and those of DeepCoder and SYNTHETIC-1, which are like it."""
    given, wanted = case["input"], case["output"]
    if (case.get("testtype") or case.get("type")) not in _CALLS:
        return StdinTest(stdin=_text(given), stdout=_text(wanted))
    own = case.get("metadata") or {}
    name = case.get("fn_name") or own.get("func_name") or metadata.get("func_name")
    if not name:
        raise ValueError("metadata: a functional test needs 'func_name'")
    expected = _json("output", wanted)
    if case.get("fn_name") and isinstance(expected, list) and len(expected) == 1:
        expected = expected[0]  # as in APPS, where SYNTHETIC-1 has it from
    return CallTest(call=name, args=_args("input", given), expected=expected)


def _synthetic(column: str, row: Row) -> list[Test]:
    info = _json(column, row[column])
    if not isinstance(info, dict) or "test_cases" not in info:
        raise ValueError(f"{column}: expected 'test_cases'")
    return [_case(each, {}) for each in info["test_cases"]]


def _assert_list(column: str, row: Row) -> list[Test]:
    setup = row.get("test_setup_code") or "\n".join(row.get("test_imports") or ())
    return [AssertTest(asserts=f"{setup}\n{each}") for each in _json(column, row[column])]


def _test_code(column: str, row: Row) -> list[Test]:
    code, name = row[column], row.get("entry_point")
    if not isinstance(code, str):
        raise ValueError(f"test: expected Python source, got {type(code).__name__}")
    call = f"\ncheck({name})\n" if name and "def check(" in code else ""
    return [AssertTest(asserts=code + call)]


_READERS: dict[str, Callable[[str, Row], list[Test]]] = {
    "tests": _any,
    "input_output": _any,
    "public_test_cases": _live_code_bench,
    "private_test_cases": _live_code_bench,
    "verification_info": _synthetic,
    "test_list": _assert_list,
    "test": _test_code,
    "test_code": _test_code,
    "answer": _any,
}


def _json(column: str, value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        raise ValueError(f"{column}: not JSON ({error.msg}): {value!r:.60}") from error
    except ValueError as error:
        raise ValueError(f"{column}: {error}: leave this row out") from error


def _text(value: str | Sequence[str]) -> str:
    """Some rows hold lines."""
    return value if isinstance(value, str) else "\n".join(map(str, value))
