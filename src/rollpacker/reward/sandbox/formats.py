"""Tests from rows of the datasets that people have.

Nothing is unpickled: rows that hold pickles are refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollpacker.reward.sandbox.types import AssertTest, CallTest, StdinTest, Test, parse_test

Row = Mapping[str, Any]


def read_tests(row: Row) -> list[Test]:
    """The tests of a row, by its columns. Raises ``ValueError`` when it has none that are known.

    Known are ``tests`` (a list of this package's own objects), ``input_output`` (TACO, APPS),
    ``public_test_cases`` with ``private_test_cases`` (LiveCodeBench), ``test_list`` (MBPP),
    ``test`` (KodCode, HumanEval), and an ``answer`` that is like ``input_output`` or ``tests``
    (verl, PRIME). JSON may be given as text.
    """
    for column, read in _READERS.items():
        if row.get(column):
            tests = read(row)
            if tests:
                return tests
    raise ValueError(
        f"a row has no tests: expected one of the columns {', '.join(_READERS)}, "
        f"got {', '.join(sorted(row))}"
    )


def _own(row: Row) -> list[Test]:
    return [parse_test(each) for each in _json("tests", row["tests"])]


def _input_output(row: Row) -> list[Test]:
    return _pairs("input_output", _json("input_output", row["input_output"]))


def _answer(row: Row) -> list[Test]:
    data = _json("answer", row["answer"])
    if isinstance(data, list):
        return [parse_test(each) for each in data]
    return _pairs("answer", data)


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
        CallTest(call=name, args=given, expected=wanted[0] if wrapped else wanted)
        for given, wanted in pairs
    ]


def _live_code_bench(row: Row) -> list[Test]:
    cases: list[Any] = []
    for column in ("public_test_cases", "private_test_cases"):
        if row.get(column):
            cases += _json(column, row[column])
    metadata = _json("metadata", row.get("metadata") or "{}")
    return [_live_case(case, metadata) for case in cases]


def _live_case(case: Mapping[str, Any], metadata: Mapping[str, Any]) -> Test:
    if case["testtype"] == "stdin":
        return StdinTest(stdin=case["input"], stdout=case["output"])
    if "func_name" not in metadata:
        raise ValueError("metadata: a functional test needs 'func_name'")
    # One argument a line.
    args = [json.loads(line) for line in case["input"].splitlines() if line.strip()]
    return CallTest(call=metadata["func_name"], args=args, expected=json.loads(case["output"]))


def _assert_list(row: Row) -> list[Test]:
    setup = row.get("test_setup_code") or "\n".join(row.get("test_imports") or ())
    return [AssertTest(asserts=f"{setup}\n{each}") for each in _json("test_list", row["test_list"])]


def _test_code(row: Row) -> list[Test]:
    name = row.get("entry_point")
    call = f"\ncheck({name})\n" if name and "def check(" in row["test"] else ""
    return [AssertTest(asserts=row["test"] + call)]


_READERS: dict[str, Callable[[Row], list[Test]]] = {
    "tests": _own,
    "input_output": _input_output,
    "public_test_cases": _live_code_bench,
    "test_list": _assert_list,
    "test": _test_code,
    "answer": _answer,
}


def _json(column: str, value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise ValueError(
            f"{column}: not JSON; pickled tests, as of LiveCodeBench, must be converted first"
        ) from error


def _text(value: str | Sequence[str]) -> str:
    """Some rows hold lines."""
    return value if isinstance(value, str) else "\n".join(map(str, value))
