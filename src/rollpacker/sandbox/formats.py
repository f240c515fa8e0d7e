"""Reads tests from rows of public datasets. Rows that hold pickles are refused, never unpickled."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from typing import Any

from rollpacker.sandbox.types import AssertTest, CallTest, StdinTest, Test, parse_test

# Arguments and results of calls, in the notations of datasets.

_LIST = re.compile(r"(?:typing\.)?(List|list|Sequence|Iterable|Optional)\[(.*)\]", re.DOTALL)
_PLAIN = {"int": 0, "float": 0, "str": 0, "bool": 0, "list": 1, "List": 1}
_PLAIN |= {"ListNode": 1, "TreeNode": 1}
_NUMBER = re.compile(r"-?[0-9]{1,18}")
_MOST_DIGITS = 20_000


def wanted(
    column: str, name: str, inputs: Sequence[Any], outputs: Sequence[Any], row: Mapping[str, Any]
) -> tuple[Sequence[Any], bool]:
    """Return the values that calls must return, and whether a list with only that value is right as
    well.

    Outputs are JSON text if the inputs are, as in LiveCodeBench and PRIME. Beside arguments that
    are values, a text is a text. APPS and TACO put some results into a list of their own. The
    return type in the row's starter code decides whether they did. Without it, results that are all
    lists of one may be either, so both are right, as in the harnesses of APPS and PRIME.
    """
    as_text = all(isinstance(each, str) for each in (*inputs, *outputs))
    values = decoded(column, outputs) if as_text else outputs
    if not all(isinstance(each, list) and len(each) == 1 for each in values):
        return values, False
    bare = [each[0] for each in values]
    depth = _depth_of_type(_signature(name, row)[1])
    if depth is not None:
        return (bare if _depth(values) > depth else values), False
    return (bare, True) if len(values) > 2 * as_text else (values, False)


def _depth(values: Sequence[Any]) -> int:
    depth = 0
    while lists := [each for each in values if isinstance(each, list)]:
        values = [item for each in lists for item in each]
        depth += 1
    return depth


def _depth_of_type(text: str) -> int | None:
    depth = 0
    while found := _LIST.fullmatch(text.strip()):
        depth += found[1] != "Optional"
        text = found[2]
    inner = _PLAIN.get(text.strip())
    return None if inner is None else depth + inner


def _signature(name: str, row: Mapping[str, Any]) -> tuple[str, str]:
    starter = row.get("starter_code")
    if not isinstance(starter, str):
        return "", ""
    head = rf"^[ \t]*def {re.escape(name)}\s*\(([^)]*)\)\s*(?:->\s*([^:\n]+))?:"
    found = re.search(head, starter, re.MULTILINE)
    return (found[1], found[2] or "") if found else ("", "")


def nodes_of(column: str, name: str, row: Mapping[str, Any]) -> dict[str, str]:
    """Return LeetCode's list and tree classes by place and name of an argument, and for the
    ``return``. A leading ``*`` stands for a list of them."""
    arguments, returned = _signature(name, row)
    if "Node" not in arguments + returned:
        return {}
    given = [each for each in re.split(r",\s*(?=\w+\s*[:=])", arguments) if ":" in each]
    texts = {str(place): each for place, each in enumerate(given)} | {"return": returned}
    texts |= {each.partition(":")[0].strip(" \nself,"): each for each in given}
    if any(re.search(r"\bNode\b", text) for text in texts.values()):
        raise ValueError(f"{column}: graphs of class 'Node' are not supported: leave this row out")
    kinds = {
        key: re.search(r"([Ll]ist\[.*)?\b((?:List|Tree)Node)\b", text)
        for key, text in texts.items()
    }
    return {key: "*" * bool(kind[1]) + kind[2] for key, kind in kinds.items() if kind}


def returns_nothing(name: str, row: Mapping[str, Any]) -> bool:
    """Return whether the starter code declares that the function changes its argument in place."""
    return _signature(name, row)[1].strip() == "None"


def with_number_keys(args: list[Any]) -> list[Any]:
    """Restore the integer keys of a single argument that JSON turned into text, as in APPS."""
    if len(args) != 1 or not isinstance(args[0], dict):
        return args
    if not all(isinstance(key, str) and _NUMBER.fullmatch(key) for key in args[0]):
        return args
    return [{int(key): value for key, value in args[0].items()}]


def decoded(column: str, texts: Sequence[str]) -> Sequence[Any]:
    """Decode values in JSON's or Python's notation. If a word among them is in neither notation,
    all are plain text."""
    values: list[Any] = []
    for text in texts:
        try:
            values.append(value_of(column, text))
        except ValueError:
            if not text[:1].isalpha():
                raise
            return texts
    return values


def value_of(column: str, text: str) -> Any:
    """Decode a value in JSON's or Python's notation."""
    try:
        return read_json(column, text)
    except ValueError as error:
        try:
            return ast.literal_eval(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            raise error from None


def read_json(column: str, value: Any, integer: Callable[[str], int] = int) -> Any:
    """Decode a value that may be JSON text. Raises ``ValueError``, one line with the column."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value, parse_int=integer)
    except json.JSONDecodeError as error:
        raise ValueError(f"{column}: not JSON ({error.msg}): {value!r:.60}") from error
    except (ValueError, RecursionError) as error:
        if integer is int and isinstance(error, ValueError):
            return read_json(column, value, _long)
        raise ValueError(f"{column}: {error}: leave this row out") from error


def _long(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"an integer of {len(digits):,} digits")
    return int(Decimal(digits))


Row = Mapping[str, Any]

_TEST = re.compile(r"^[ \t]*(?:assert\b|def test|class Test)", re.MULTILINE)
"""A line of tests in source, which JSON lacks."""
_CALLS = ("functional", "function_call")
_LAYOUTS = (
    "expected 'inputs' and 'outputs', 'input' and 'output', or a list of tests: "
    "{input, output}, {stdin, stdout}, {call, args, expected}, {asserts} or asserts as text"
)
_JUDGED = ("generated_checker", "checker", "interaction_format")
"""Columns of rows for which comparing outputs is not enough."""


def read_tests(row: Row) -> list[Test]:
    """Return the tests of a row. Raises ``ValueError`` as ``find_tests``."""
    return find_tests(row)[1]


def find_tests(row: Row) -> tuple[str, list[Test]]:
    """Return the column that has the tests of a row, and the tests.

    Known are ``tests`` (this package's own objects, DeepCoder), ``input_output`` (TACO, APPS,
    LeetCodeDataset), ``public_test_cases`` with ``private_test_cases`` (LiveCodeBench), and
    ``public_tests`` with ``private_tests`` and ``generated_tests`` (CodeContests). Also known are
    ``official_tests`` (Codeforces), ``verification_info`` (SYNTHETIC-1 and 2), ``test_list``
    (MBPP), ``test_cases`` (AceCode), ``unit_tests`` (OpenCodeInstruct), and ``test`` or
    ``test_code`` (KodCode, HumanEval). A ``ground_truth`` or ``answer`` may be like
    ``input_output`` or ``tests`` (verl, PRIME, code-r1), also in ``reward_model`` or NeMo Gym's
    ``verifier_metadata``. JSON may be text.

    Raises ``ValueError``, one line with the column, if there are none or their layout is unknown.
    """
    for column, read in _READERS.items():
        if row.get(column) and (tests := read(column, row)):
            return column, tests
    raise ValueError(
        f"a row has no tests: expected one of the columns {', '.join(_READERS)}, "
        f"got {', '.join(sorted(row))}"
    )


def float_tolerance(row: Row) -> float | None:
    """Return the row's column ``float_tolerance``. Raises ``ValueError``, one line."""
    value = row.get("float_tolerance")
    if value is None:
        return None
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value < math.inf:
        raise ValueError(f"float_tolerance: expected a finite number above 0, got {value!r:.60}")
    return float(value)


def _any(column: str, row: Row) -> list[Test]:
    value = row[column]
    value = _inner(column, value)
    if isinstance(value, str) and _TEST.search(value):
        return [AssertTest(asserts=value)]
    return _tests(column, read_json(column, value), row)


def _inner(column: str, value: Any) -> Any:
    # The tests in verl's ``reward_model`` and NeMo Gym's ``verifier_metadata``.
    if column == "verifier_metadata":
        value = read_json(column, value)
    known = ("ground_truth", "unit_tests") if isinstance(value, Mapping) else ()
    return next((value[key] for key in known if key in value), value)


def _tests(column: str, data: Any, row: Row) -> list[Test]:
    if isinstance(data, Mapping):
        if data.get("assert_case"):  # verl
            return _tests(column, read_json(column, data["assert_case"]), row)
        if {"inputs", "outputs"} & data.keys():
            return _pairs(column, data, row)
        if isinstance(data.get("functional"), str):  # code-r1
            return [AssertTest(asserts=data["functional"])]
        if "test_cases" in data:
            return _tests(column, read_json("test_cases", data["test_cases"]), row)
        if isinstance(data.get("input"), list) and isinstance(data.get("output"), list):
            pairs = {"inputs": data["input"], "outputs": data["output"]}
            return _pairs(column, {**pairs, "fn_name": data.get("fn_name")}, row)
        data = [data]
    if not isinstance(data, list):
        raise ValueError(f"{column}: {_LAYOUTS}, got {data!r:.60}")
    calls = [each for each in data if isinstance(each, Mapping) and each.get("fn_name")]
    if calls and len(calls) == len(data) and all("output" in each for each in calls):  # SYNTHETIC-1
        inputs, outputs = ([each.get(key) for each in calls] for key in ("input", "output"))
        pairs = {"inputs": inputs, "outputs": outputs, "fn_name": calls[0]["fn_name"]}
        return _pairs(column, pairs, row)
    return [_one(column, each, row) for each in data]


def _one(column: str, each: Any, row: Row) -> Test:
    if isinstance(each, str) and "assert" in each:
        return _asserts(each, row)
    if not isinstance(each, Mapping):
        raise ValueError(f"{column}: {_LAYOUTS}, got a list with {each!r:.60}")
    if "input" in each:
        return _case(column, each, row)
    try:
        return parse_test(each)
    except ValueError as error:
        raise ValueError(f"{column}: {error}") from None


# -- pairs of lists


def _pairs(column: str, data: Mapping[str, Any], row: Row) -> list[Test]:
    if not {"inputs", "outputs"} <= data.keys():
        raise ValueError(f"{column}: expected 'inputs' and 'outputs', got {', '.join(data)}")
    inputs, outputs = data["inputs"], data["outputs"]
    if isinstance(inputs, str) and isinstance(outputs, str):
        inputs, outputs = [inputs], [outputs]
    if not (isinstance(inputs, list) and isinstance(outputs, list)):
        raise ValueError(f"{column}: 'inputs' and 'outputs' must be lists, got {inputs!r:.60}")
    if len(inputs) != len(outputs):
        raise ValueError(f"{column}: {len(inputs)} inputs and {len(outputs)} outputs")
    name = data.get("fn_name") or row.get("fn_name")
    if not name:
        return [
            StdinTest(stdin=_text(column, given), stdout=_text(column, result))
            for given, result in zip(inputs, outputs, strict=True)
        ]
    results, or_list = wanted(column, name, inputs, outputs, row)
    calls = [_call(column, name, *each, row) for each in zip(inputs, results, strict=True)]
    return [replace(call, or_list=or_list) for call in calls]


def _call(column: str, name: str, given: Any, result: Any, row: Row) -> CallTest:
    args = _args(column, given)
    _refuse_design(column, name, args, result)
    in_place = result is not None and isinstance(args, list) and returns_nothing(name, row)
    nodes = nodes_of(column, name, row)
    for key, value in args.items() if isinstance(args, Mapping) else enumerate(args):
        if str(key) in nodes and not isinstance(value, list | None):
            raise ValueError(f"{column}: a {nodes[str(key)]} must be a list, got {value!r:.60}")
    if result is None and "return" in nodes:
        result = []
    return CallTest(call=name, args=args, expected=result, in_place=in_place, nodes=nodes or None)


def _args(column: str, given: Any) -> list[Any] | dict[str, Any]:
    # Arguments as text stand one per line, or as ``name = value`` with commas.
    if isinstance(given, str):
        if re.match(r"\s*[A-Za-z_]\w*\s*=[^=]", given):
            return _named(column, given)
        lines = [line for line in given.splitlines() if line.strip()]
        return with_number_keys([value_of(column, line) for line in lines])
    if isinstance(given, Mapping):
        return dict(given)
    if not isinstance(given, list):
        raise ValueError(
            f"{column}: the input of a call must be a list, a mapping or text, got {given!r:.60}"
        )
    return with_number_keys(given)


def _named(column: str, text: str) -> dict[str, Any]:
    try:
        call = ast.parse(f"f({text})", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            raise ValueError("some have no name")
        return {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}
    except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError(f"{column}: arguments by name cannot be read: {text!r:.60}") from error


def _refuse_design(column: str, name: str, args: Any, result: Any) -> None:
    # LeetCode's tasks of class design, which call one method after another.
    if not (isinstance(args, list) and len(args) == 2 and all(isinstance(a, list) for a in args)):
        return
    methods, each = args
    if methods[:1] == [name] and len(methods) == len(each) and isinstance(result, list):
        raise ValueError(
            f"{column}: lists of operations on a class ('{name}') are not supported: "
            "write such tests as asserts, or leave the row out"
        )


# -- cases


def _live_code_bench(_: str, row: Row) -> list[Test]:
    tests: list[Test] = []
    for column in ("public_test_cases", "private_test_cases"):
        if value := row.get(column):
            tests += _tests(column, _live_cases(column, value), row)
    return tests


def _live_cases(column: str, value: Any) -> Any:
    if isinstance(value, str) and not value.lstrip().startswith("["):
        raise ValueError(
            f"{column}: a pickle (in base64 and zlib) is refused, because loading it can run "
            "code: if you trust the dataset, replace the column once by the JSON "
            "text pickle.loads(zlib.decompress(base64.b64decode(value)))"
        )
    return read_json(column, value)


def _case(column: str, case: Mapping[str, Any], row: Row) -> Test:
    # LiveCodeBench's case, and the similar ones of DeepCoder and SYNTHETIC-1.
    result = case.get("output", case.get("expected_output"))
    if "output" not in case and "expected_output" not in case:
        raise ValueError(f"{column}: expected 'output' beside 'input', got {', '.join(case)}")
    kind, name, given = case.get("testtype") or case.get("type"), _name(case, row), case["input"]
    if kind not in _CALLS and (kind or not name or not isinstance(given, str | list | Mapping)):
        return StdinTest(stdin=_text(column, given), stdout=_text(column, result))
    if not name:
        raise ValueError("metadata: a functional test needs 'func_name'")
    if isinstance(given, str) and isinstance(result, str):
        [result] = decoded(column, [result])
    return _call(column, name, given, result, row)


def _name(case: Mapping[str, Any], row: Row) -> str | None:
    own = case.get("metadata")
    own = own if isinstance(own, Mapping) else {}
    return (
        case.get("fn_name")
        or own.get("func_name")
        or _metadata(row).get("func_name")
        or row.get("fn_name")
    )


def _metadata(row: Row) -> Mapping[str, Any]:
    value = row.get("metadata")
    if isinstance(value, str) and "func_name" in value:
        value = read_json("metadata", value)
    return value if isinstance(value, Mapping) else {}


def _contest(_: str, row: Row) -> list[Test]:
    tests: list[Test] = []
    judged = next((name for name in _JUDGED if row.get(name)), None)
    if judged is None and row.get("input_mode") == "file":
        judged = "input_mode"
    if judged is not None:
        raise ValueError(
            f"{judged}: its programs need more than a comparison of outputs, which is not "
            "supported: leave this row out"
        )
    for column in [name for name, read in _READERS.items() if read is _contest]:
        value = row.get(column)
        if value and not isinstance(value, int):  # an integer only counts the tests
            tests += _tests(column, read_json(column, value), row)
    return tests


def _input_output(column: str, row: Row) -> list[Test]:
    data = read_json(column, row[column])
    if not isinstance(data, list):
        return _tests(column, data, row)
    # LeetCodeDataset, whose asserts build the lists and trees that these only show.
    if row.get("test") and row.get("entry_point"):
        return []
    name = str(row.get("entry_point") or "").removeprefix("Solution().")
    return _tests(column, data, {"fn_name": name, **row})


# -- asserts


def _asserts(code: str, row: Row) -> AssertTest:
    before = [*(row.get("test_imports") or ()), row.get("test_setup_code") or ""]
    return AssertTest(asserts="\n".join([*filter(None, before), code]))


def _test_code(column: str, row: Row) -> list[Test]:
    code, name, prompt = row[column], row.get("entry_point"), row.get("prompt")
    if not isinstance(code, str):
        raise ValueError(f"{column}: expected Python source, got {type(code).__name__}")
    if not (name and "def check(" in code):
        return [AssertTest(asserts=code)]
    # HumanEval's prompt is the beginning of the program; others ask in words.
    source = isinstance(prompt, str) and re.search(r"^(def|from|import) ", prompt, re.MULTILINE)
    return [
        AssertTest(
            asserts=f"{code}\ncheck({name})\n",
            prompt=str(prompt) if source else "",
            stub=name if source else "",
        )
    ]


_READERS: dict[str, Callable[[str, Row], list[Test]]] = {
    "tests": _any,
    "input_output": _input_output,
    "public_test_cases": _live_code_bench,
    "private_test_cases": _live_code_bench,
    "public_tests": _contest,
    "private_tests": _contest,
    "generated_tests": _contest,
    "official_tests": _contest,
    "verification_info": _any,
    "test_list": _any,
    "assert_case": _any,
    "asserts": _any,
    "test_cases": _any,
    "unit_tests": _any,
    "test": _test_code,
    "test_code": _test_code,
    "ground_truth": _any,
    "reward_model": _any,
    "verifier_metadata": _any,
    "answer": _any,
}


def _text(column: str, value: Any) -> str:
    if isinstance(value, list) and not any(isinstance(each, Mapping) for each in value):
        return "\n".join(map(str, value))
    if isinstance(value, str | int | float):
        return str(value)
    raise ValueError(f"{column}: expected text to read or to print, got {value!r:.60}")
