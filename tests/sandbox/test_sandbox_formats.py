import json
from typing import Any

import pytest

from rollpacker.sandbox import (
    AssertTest,
    CallTest,
    Sandbox,
    StdinTest,
    find_tests,
    read_tests,
)

PAIRS = {"inputs": ["1 2\n", ["3 4", ""]], "outputs": ["3\n", ["7"]]}
STDIN = [StdinTest(stdin="1 2\n", stdout="3\n"), StdinTest(stdin="3 4\n", stdout="7")]
CALLS = {"fn_name": "add", "inputs": [[1, 2]], "outputs": [[3]]}
CALL = [CallTest(call="add", args=[1, 2], expected=3)]
WRAPPED = [CallTest(call="add", args=[1, 2], expected=3, or_list=True)]
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
        ({"input_output": json.dumps(CALLS)}, WRAPPED),
        (
            {
                "verification_info": [
                    {"fn_name": "f", "input": [n], "output": [*range(n)]} for n in (1, 2)
                ]
            },
            [CallTest(call="f", args=[n], expected=[*range(n)]) for n in (1, 2)],
        ),
        (
            {"ground_truth": {"assert_case": ["assert f(1)"], "inputs": [""], "outputs": [None]}},
            [AssertTest(asserts="assert f(1)")],
        ),
        ({"assert_case": '["assert f(1)"]'}, [AssertTest(asserts="assert f(1)")]),
        ({"asserts": "assert f(1)"}, [AssertTest(asserts="assert f(1)")]),
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
        (
            {"test": "def check(f): pass", "entry_point": "add", "prompt": "def add(a, b):\n"},
            [
                AssertTest(
                    asserts="def check(f): pass\ncheck(add)\n",
                    prompt="def add(a, b):\n",
                    stub="add",
                )
            ],
        ),
        (
            {"test": "def check(f): pass", "entry_point": "add", "prompt": "Add two numbers."},
            [AssertTest(asserts="def check(f): pass\ncheck(add)\n")],
        ),
        (
            {"public_tests": {"input": ["1 2\n"], "output": ["3\n"]}, "private_tests": {}},
            STDIN[:1],
        ),
        (
            {
                "public_tests": {"input": [], "output": []},
                "private_tests": json.dumps([{"input": "1 2\n", "output": "3\n"}]),
                "generated_tests": {"input": ["3 4\n"], "output": ["7"]},
            },
            STDIN,
        ),
        (
            {"official_tests": [{"input": "1 2\n", "output": "3\n"}], "generated_tests": 7},
            STDIN[:1],
        ),
        ({"test_cases": ["assert f(1)"]}, [AssertTest(asserts="assert f(1)")]),
        ({"unit_tests": '["\\nassert f(1)\\n"]'}, [AssertTest(asserts="\nassert f(1)\n")]),
        ({"tests": "def test_f(): f()"}, [AssertTest(asserts="def test_f(): f()")]),
        ({"tests": "assert f(1)\nassert f(2)"}, [AssertTest(asserts="assert f(1)\nassert f(2)")]),
        (
            {"tests": {"input": "1 2\n", "expected_output": 3}},
            [StdinTest(stdin="1 2\n", stdout="3")],
        ),
        ({"input_output": {"inputs": "1 2\n", "outputs": "3\n"}}, STDIN[:1]),
        ({"input_output": {"inputs": [7], "outputs": [0.5]}}, [StdinTest(stdin="7", stdout="0.5")]),
        ({"ground_truth": json.dumps(PAIRS)}, STDIN),
        (
            {"reward_model": {"ground_truth": '{"functional": "assert f(1)"}'}},
            [AssertTest(asserts="assert f(1)")],
        ),
        ({"verifier_metadata": {"unit_tests": {**PAIRS, "fn_name": None}}}, STDIN),
        ({"verifier_metadata": json.dumps({"unit_tests": PAIRS})}, STDIN),
        (
            {"tests": {"fn_name": "add", "inputs": [{"a": 1, "b": 2}], "outputs": [3]}},
            [CallTest(call="add", args={"a": 1, "b": 2}, expected=3)],
        ),
        (
            {
                "input_output": [{"input": "a = [1, -1], b = 'x=1'", "output": "None"}],
                "entry_point": "Solution().add",
            },
            [CallTest(call="add", args={"a": [1, -1], "b": "x=1"}, expected=None)],
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
        ({"tests": "42"}, r"^tests: expected 'inputs' and 'outputs', .*; got 42$"),
        ({"tests": [3]}, "^tests: expected 'inputs' and 'outputs', .* a list with 3$"),
        ({"tests": ["add(1, 2)"]}, r"^tests: .* a list with 'add\(1, 2\)'$"),
        ({"tests": [{"input": "1"}]}, "^tests: expected 'output' beside 'input', got input$"),
        ({"tests": [{"stdin": "1"}]}, r"^tests: a test has the keys \['stdin'\], expected "),
        (
            {"tests": [{"input": {"a": 1}, "output": "1"}]},
            "^tests: expected text to read or ",
        ),
        (
            {"test_cases": [{"input": "1", "output": None}]},
            "^test_cases: expected .* got None$",
        ),
        ({"input_output": {"inputs": 3, "outputs": 3}}, "^input_output: .* must be lists, got 3$"),
        ({"public_tests": {"input": ["1"], "output": []}}, "^public_tests: 1 inputs and 0 outputs"),
        ({"test_list": [3]}, "^test_list: .* a list with 3$"),
        (
            {"official_tests": [{"input": "1", "output": "1"}], "generated_checker": "print(1)"},
            "^generated_checker: its programs are judged by more than their output",
        ),
        (
            {"official_tests": [{"input": "1", "output": "1"}], "input_mode": "file"},
            "^input_mode: its programs are judged by more than their output",
        ),
        (
            {
                "input_output": {
                    "fn_name": "Cache",
                    "inputs": [[["Cache", "put", "get"], [[2], [1, 1], [1]]]],
                    "outputs": [[None, None, 1]],
                }
            },
            "^input_output: a list of operations on class 'Cache', which is not read",
        ),
        (
            {"input_output": [{"input": "a = 1, 2", "output": "3"}], "entry_point": "add"},
            "^input_output: arguments by name cannot be read: 'a = 1, 2'$",
        ),
    ],
)
def test_rows_that_are_refused(row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        read_tests(row)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("inputs", "outputs", "expected"),
    [
        (["1"], ["[0, 1]"], [[0, 1]]),
        (["1"], ["true"], [True]),
        (["1"], ["True"], [True]),
        (["1"], ["null"], [None]),
        (["1"], ["0.5"], [0.5]),
        (["1"], ['"a"'], ["a"]),
        (["1"], ["a"], ["a"]),
        (["1", "2"], ["a", "1"], ["a", "1"]),
        (["1"], ["[3]"], [[3]]),
        (["1", "2", "3"], ["[3]", "[4]", "[5]"], [3, 4, 5]),
        ([[1]], ["3"], ["3"]),
        ([[1]], ["true"], ["true"]),
        ([["a"]], [["b"]], ["b"]),
        ([[1]], [[[3]]], [[3]]),
        (["1"], [3], [3]),
        (["1"], [[3]], [3]),
    ],
)
def test_what_calls_must_return(inputs: list[Any], outputs: list[Any], expected: list[Any]) -> None:
    row = {"input_output": {"fn_name": "f", "inputs": inputs, "outputs": outputs}}
    found = [test.expected for test in read_tests(row) if isinstance(test, CallTest)]
    assert json.dumps(found) == json.dumps(expected)


@pytest.mark.parametrize("output", ["[0, 1", "'a", "{]", "-", "1 2"])
def test_outputs_that_are_neither_json_nor_words(output: str) -> None:
    row = {"input_output": {"fn_name": "f", "inputs": ["1"], "outputs": [output]}}
    with pytest.raises(ValueError, match=r"^input_output: not JSON \("):
        read_tests(row)


def calls(data: dict[str, Any], **columns: Any) -> list[CallTest]:
    tests = read_tests({"input_output": {"fn_name": "f", **data}, **columns})
    return [test for test in tests if isinstance(test, CallTest)]


@pytest.mark.parametrize(
    ("annotation", "outputs", "expected"),
    [
        ("List[int]", [[1], [2], [3]], [[1], [2], [3]]),
        ("List[int]", [[[1]], [[2, 3]]], [[1], [2, 3]]),
        ("list[int]", ["[1]", "[2]", "[3]"], [[1], [2], [3]]),
        ("Optional[List[int]]", [[1]], [[1]]),
        ("List[List[int]]", [[[1]]], [[[1]]]),
        ("List[List[int]]", [[[[1]]]], [[[1]]]),
        ("List", [[1]], [[1]]),
        ("int", [[1]], [1]),
        ("int", ["[1]"], [1]),
        ("TreeNode", [[1]], [[1]]),
    ],
)
def test_the_starter_code_says_how_deep_results_are(
    annotation: str, outputs: list[Any], expected: list[Any]
) -> None:
    inputs = ["1" if isinstance(each, str) else [1] for each in outputs]
    starter = f"class Solution:\n    def f(self, a: int) -> {annotation}:\n        "
    found = calls({"inputs": inputs, "outputs": outputs}, starter_code=starter)
    assert [test.expected for test in found] == expected
    assert not any(test.or_list for test in found)


def test_texts_that_are_all_lists_of_one_may_be_either(sandbox: Sandbox) -> None:
    tests = calls({"inputs": ["1", "2", "3"], "outputs": ["[1]", "[2]", "[3]"]})
    for returned, verdict in (("a", "pass"), ("[a]", "pass"), ("[[a]]", "fail"), ("[]", "fail")):
        program = f"def f(a): return {returned}"
        assert sandbox.run(program, tests, 2.0, stop_early=True).verdict == verdict


@pytest.mark.parametrize(
    ("given", "args"),
    [
        ([{"1": 2, "-3": 4}], [{1: 2, -3: 4}]),
        ('{"1": 2}', [{1: 2}]),
        ([{"1": 2, "a": 4}], [{"1": 2, "a": 4}]),
        ([{"1": 2}, 3], [{"1": 2}, 3]),
        ([{}], [{}]),
        ([{"a": {"1": 2}}], [{"a": {"1": 2}}]),
    ],
)
def test_number_keys_of_a_single_argument(sandbox: Sandbox, given: Any, args: Any) -> None:
    tests = calls({"inputs": [given], "outputs": [[1]] if isinstance(given, list) else ["1"]})
    assert [test.args for test in tests] == [args]
    program = f"def f(*a): return int(list(a) == {args!r})"
    assert sandbox.run(program, tests, 2.0).verdict == "pass"


def test_the_column_is_named() -> None:
    assert find_tests({"prompt": "x", "test_list": ["assert 1"]})[0] == "test_list"
    assert find_tests({"private_tests": {"input": ["1"], "output": ["1"]}})[0] == "private_tests"


@pytest.mark.parametrize(
    ("starter", "in_place"),
    [
        ("class Solution:\n    def f(self, nums: List[int]) -> None:\n", True),
        ("class Solution:\n    def f(self, nums: List[int]) -> List[int]:\n", False),
        ("class Solution:\n    def g(self, nums: List[int]) -> None:\n", False),
        (None, False),
    ],
)
def test_the_starter_code_says_what_returns_nothing(starter: str | None, in_place: bool) -> None:
    data = {"fn_name": "f", "inputs": [[[1, 2]]], "outputs": [[[2, 1]]]}
    (test,) = read_tests({"input_output": data, "starter_code": starter})
    assert isinstance(test, CallTest)
    assert (test.args, test.expected, test.in_place) == ([[1, 2]], [2, 1], in_place)


def test_methods_of_a_solution_class_are_found(sandbox: Sandbox) -> None:
    program = "class Solution:\n    def add(self, a, b): return a + b"
    assert sandbox.run(program, read_tests({"input_output": CALLS}), 2.0).verdict == "pass"
