"""Rows of datasets as tests. ``format_cases.jsonl`` has a row a line, with the tests that it means
or what is wrong with it; ``reward/cases`` run solutions of such rows."""

import base64
import json
import pickle
import re
import zlib
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from rollpacker.sandbox import Sandbox, StdinTest, Test, find_tests, read_tests

CASES = [json.loads(line) for line in Path(__file__).with_name("format_cases.jsonl").open()]


def plain(test: Test) -> dict[str, Any]:
    """What of a test is no default."""
    values = {field: getattr(test, field.name) for field in fields(test)}
    return {field.name: value for field, value in values.items() if value != field.default}


def found(row: dict[str, Any]) -> Any:
    """Tests as JSON, which tells 1 from true, or the error."""
    try:
        return [plain(test) for test in read_tests(row)]
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_rows(case: dict[str, Any]) -> None:
    tests = found(case["row"])
    if "error" in case:
        assert re.search(case["error"], tests)
        assert "\n" not in tests
    else:
        assert json.dumps(tests) == json.dumps(case["tests"])


def test_number_keys_of_a_single_argument() -> None:
    data = {"fn_name": "f", "inputs": [[{"1": 2, "-3": 4}]], "outputs": [[1]]}
    assert found({"input_output": data})[0]["args"] == [{1: 2, -3: 4}]


def test_the_column_is_named() -> None:
    assert find_tests({"prompt": "x", "test_list": ["assert 1"]})[0] == "test_list"
    assert find_tests({"private_tests": {"input": ["1"], "output": ["1"]}})[0] == "private_tests"


def test_pickled_private_tests_are_refused_with_the_way_to_convert_them() -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return (pytest.exit, ("it was unpickled",))

    def packed(value: Any) -> str:
        return base64.b64encode(zlib.compress(pickle.dumps(value))).decode()

    cases = json.dumps([{"input": "[]\n5", "output": "[]", "testtype": "functional"}])
    row = {"public_test_cases": cases, "metadata": json.dumps({"func_name": "addAll"})}
    for value in (cases, Bomb()):
        with pytest.raises(ValueError, match=r"private_test_cases: a pickle .* is refused"):
            read_tests({**row, "private_test_cases": packed(value)})
    converted = pickle.loads(zlib.decompress(base64.b64decode(packed(cases))))
    assert len(read_tests({**row, "private_test_cases": converted})) == 2


def test_long_integers(sandbox: Sandbox) -> None:
    data = '{"fn_name": "f", "inputs": [[%d]], "outputs": [%s]}'
    tests = read_tests({"input_output": data % (5000, "9" * 5000)})
    tests.append(StdinTest(stdin="9" * 5000, stdout="9" * 5000))
    program = "def f(x): return 10**x - 1\nif __name__ == '__main__': print(int(input()))"
    assert sandbox.run(program, tests, 2.0).verdict == "pass"
    assert sandbox.run(program.replace("- 1", "- 2"), tests, 2.0).verdict == "fail"
    with pytest.raises(ValueError, match=r"input_output: .*30,000 digits: leave this row out"):
        read_tests({"input_output": data % (5000, "9" * 30_000)})
