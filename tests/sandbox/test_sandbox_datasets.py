"""Rows shaped like those of public datasets, run with a right and a wrong solution."""

import base64
import json
import pickle
import zlib
from typing import Any

import pytest

from rollpacker.sandbox import Sandbox, StdinTest, read_tests

LISTS = [[1, 2], [3, 4]]
KODCODE = {
    "style": "instruct",
    "question_id": "Algorithm_1_I",
    "question": "Merge two sorted lists.",
    "solution": "def merge(a, b):\n    return sorted(a + b)",
    "test": (
        "from solution import merge\n\nimport pytest\n\n"
        "def test_two():\n    assert merge([1, 3], [2]) == [1, 2, 3]\n\n"
        "@pytest.mark.parametrize('a, b, wanted', [([], [], []), ([2], [1], [1, 2])])\n"
        "def test_more(a, b, wanted):\n    assert merge(a, b) == wanted\n\n"
        "def test_error():\n    with pytest.raises(TypeError):\n        merge(1, [2])\n"
    ),
    "test_info": [{"function_name": "merge", "parameter_list": "(a, b)"}],
}
TACO_STDIN = {
    "question": "Add two numbers.",
    "input_output": json.dumps(
        {"inputs": ["1 2\n", "10 20\n"] * 50, "outputs": ["3\n", "30\n"] * 50}
    ),
    "difficulty": "EASY",
    "starter_code": "",
}
APPS_CALL = {
    "question": "Add up a list.",
    "input_output": json.dumps(
        {"fn_name": "total", "inputs": [[each] for each in LISTS], "outputs": [[3], [7]]}
    ),
    "starter_code": "class Solution:\n    def total(self, values):\n",
}
CASES = [
    {"input": "[1, 2]\n5", "output": "[6, 7]", "testtype": "functional"},
    {"input": "[]\n5", "output": "[]", "testtype": "functional"},
]
LIVE_CALL = {
    "question_content": "Add k to all.",
    "platform": "leetcode",
    "starter_code": "class Solution:\n    def addAll(self, nums, k):",
    "public_test_cases": json.dumps(CASES[:1]),
    "private_test_cases": json.dumps(CASES[1:]),
    "metadata": json.dumps({"func_name": "addAll"}),
}
LIVE_STDIN = {
    "platform": "atcoder",
    "public_test_cases": json.dumps([{"input": "3\n", "output": "9\n", "testtype": "stdin"}]),
    "private_test_cases": json.dumps([{"input": "4\n", "output": "16", "testtype": "stdin"}]),
    "metadata": "{}",
}
DEEPCODER = {
    "problem": "Add k to all.",
    "tests": json.dumps([{**case, "metadata": {"func_name": "addAll"}} for case in CASES]),
}
SYNTHETIC = {
    "prompt": "Add up a list.",
    "verification_info": json.dumps(
        {
            "language": "python",
            "test_cases": [
                {"type": "function_call", "fn_name": "total", "input": [[1, 2]], "output": [3]},
                {"type": "function_call", "fn_name": "total", "input": [[4, 5]], "output": [9]},
            ],
        }
    ),
}
ADD_ALL = "class Solution:\n    def addAll(self, nums, k):\n        return [n {} k for n in nums]"
TOTAL = "def total(values):\n    return {}\nif __name__ == '__main__':\n    print('ready')"


@pytest.mark.parametrize(
    ("row", "right", "wrong", "forgeable"),
    [
        (KODCODE, KODCODE["solution"], "def merge(a, b):\n    return a + b", True),
        (
            {**KODCODE, "test": None, "test_code": KODCODE["test"]},
            KODCODE["solution"],
            "def merge(a, b):\n    return sorted(a + b) if b else None",
            True,
        ),
        (
            TACO_STDIN,
            "a, b = map(int, input().split())\nprint(a + b)",
            "a, b = map(int, input().split())\nprint(3)",
            False,
        ),
        (
            APPS_CALL,
            "class Solution:\n    def total(self, values): return sum(values)",
            "class Solution:\n    def total(self, values): return [[sum(values)]]",
            False,
        ),
        (LIVE_CALL, ADD_ALL.format("+"), ADD_ALL.format("-"), False),
        (LIVE_STDIN, "print(int(input()) ** 2)", "print(3 * int(input()))", False),
        (DEEPCODER, ADD_ALL.format("+"), ADD_ALL.format("*"), False),
        (SYNTHETIC, TOTAL.format("sum(values)"), TOTAL.format("len(values)"), False),
    ],
)
def test_a_right_and_a_wrong_solution(
    sandbox: Sandbox, row: dict[str, Any], right: str, wrong: str, forgeable: bool
) -> None:
    tests = read_tests(row)
    found = sandbox.run(right, tests, 2.0)
    assert (found.verdict, found.forgeable) == ("pass", forgeable)
    assert sandbox.run(wrong, tests, 2.0, stop_early=True).verdict == "fail"


def test_pickled_private_tests_are_refused_with_the_way_to_convert_them() -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return (pytest.exit, ("it was unpickled",))

    def packed(value: Any) -> str:
        return base64.b64encode(zlib.compress(pickle.dumps(value))).decode()

    for value in (json.dumps(CASES[1:]), Bomb()):
        row = {**LIVE_CALL, "private_test_cases": packed(value)}
        with pytest.raises(ValueError, match=r"private_test_cases: a pickle .* is refused here"):
            read_tests(row)
    text = packed(json.dumps(CASES[1:]))
    converted = pickle.loads(zlib.decompress(base64.b64decode(text)))
    assert len(read_tests({**LIVE_CALL, "private_test_cases": converted})) == 2


def test_long_integers(sandbox: Sandbox) -> None:
    data = '{"fn_name": "f", "inputs": [[%d]], "outputs": [%s]}'
    tests = read_tests({"input_output": data % (5000, "9" * 5000)})
    tests.append(StdinTest(stdin="9" * 5000, stdout="9" * 5000))
    program = "def f(x): return 10**x - 1\nif __name__ == '__main__': print(int(input()))"
    assert sandbox.run(program, tests, 2.0).verdict == "pass"
    assert sandbox.run(program.replace("- 1", "- 2"), tests, 2.0).verdict == "fail"
    with pytest.raises(ValueError, match=r"input_output: .*30,000 digits: leave this row out"):
        read_tests({"input_output": data % (5000, "9" * 30_000)})


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"input_output": '{"fn_name": "f", "inputs": [3], "outputs": [3]}'}, "must be a list"),
        ({"input_output": "{"}, "input_output: not JSON"),
        ({"verification_info": "{}"}, "verification_info: a test has the keys"),
        ({"test": ["assert x"]}, "expected Python source"),
    ],
)
def test_rows_that_are_not_what_they_look_like(row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_tests(row)


def test_arguments_as_lines_of_text(sandbox: Sandbox) -> None:
    row = {"input_output": {"fn_name": "add", "inputs": ["1\n2"], "outputs": [[3]]}}
    program = "def add(a, b): return a + b"
    assert sandbox.run(program, read_tests(row), 1.0).verdict == "pass"
