import json
from typing import Any

import pytest

from rollpacker.sandbox import AssertTest, CallTest, Sandbox, StdinTest, read_tests

PAIRS = {"inputs": ["1 2\n", ["3 4", ""]], "outputs": ["3\n", ["7"]]}
STDIN = [StdinTest(stdin="1 2\n", stdout="3\n"), StdinTest(stdin="3 4\n", stdout="7")]
CALLS = {"fn_name": "add", "inputs": [[1, 2]], "outputs": [[3]]}
CALL = [CallTest(call="add", args=[1, 2], expected=3)]
CASES = [
    {"input": "1 2\n", "output": "3\n", "testtype": "stdin"},
    {"input": "1\n2", "output": "3", "testtype": "functional"},
]


@pytest.mark.parametrize(
    ("row", "tests"),
    [
        ({"tests": [{"stdin": "1 2\n", "stdout": "3\n"}]}, STDIN[:1]),
        ({"input_output": json.dumps(PAIRS)}, STDIN),
        ({"input_output": PAIRS, "answer": "x"}, STDIN),
        ({"input_output": json.dumps(CALLS)}, CALL),
        ({"answer": json.dumps(PAIRS)}, STDIN),
        ({"answer": [{"call": "add", "args": [1, 2], "expected": 3}]}, CALL),
        (
            {
                "public_test_cases": json.dumps(CASES[:1]),
                "private_test_cases": json.dumps(CASES[1:]),
                "metadata": '{"func_name": "add"}',
            },
            STDIN[:1] + CALL,
        ),
        (
            {"test_list": ["assert add(1, 2) == 3"], "test_imports": ["import math"]},
            [AssertTest(asserts="import math\nassert add(1, 2) == 3")],
        ),
        ({"test": "def test_a(): pass"}, [AssertTest(asserts="def test_a(): pass")]),
        (
            {"test": "def check(f): pass", "entry_point": "add"},
            [AssertTest(asserts="def check(f): pass\ncheck(add)\n")],
        ),
    ],
)
def test_rows(row: dict[str, Any], tests: list[Any]) -> None:
    assert read_tests(row) == tests


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "x"}, "a row has no tests: expected one of the columns tests"),
        ({"tests": "[]"}, "a row has no tests"),
        ({"input_output": {"inputs": [1]}}, "expected 'inputs' and 'outputs'"),
        ({"input_output": {"inputs": [1], "outputs": []}}, "1 inputs and 0 outputs"),
        ({"public_test_cases": "eJxrYJ0="}, "a pickle"),
        ({"public_test_cases": json.dumps(CASES)}, "needs 'func_name'"),
    ],
)
def test_rows_that_are_refused(row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_tests(row)


def test_methods_of_a_solution_class_are_found(sandbox: Sandbox) -> None:
    program = "class Solution:\n    def add(self, a, b): return a + b"
    assert sandbox.run(program, read_tests({"input_output": CALLS}), 2.0).verdict == "pass"
