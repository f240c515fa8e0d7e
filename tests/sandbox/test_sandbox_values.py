"""What programs return: encoded there, checked and compared here."""

import json
import time
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from case_files import read_table
from rollpacker.sandbox.grading.decode import (
    BadResultError,
    Pairs,
    SetMembers,
    decode,
    most_marks,
    read_report,
    shorten,
)
from rollpacker.sandbox.grading.grade import same_output, same_value
from rollpacker.sandbox.guest.values import encode

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
KEYS = st.text() | st.integers() | st.booleans() | st.none()
VALUES = st.recursive(
    SCALARS | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.sets(st.integers() | st.text(), max_size=4)
    ),
    max_leaves=20,
)


def exact(value: Any) -> Any:
    """A value with its types; what is decoded is not hashed yet."""
    if isinstance(value, dict | Pairs):
        return dict, [(exact(key), exact(item)) for key, item in value.items()]
    if isinstance(value, SetMembers):
        return set, set(value)
    if isinstance(value, list | tuple):
        return type(value), [exact(item) for item in value]
    if isinstance(value, float):
        return float, value.hex()
    return type(value), value


@given(VALUES)
def test_what_is_encoded_is_read_back_exactly(value: Any) -> None:
    report = read_report(json.dumps({"value": encode(value)}).encode(), most_marks(value))
    assert exact(decode(report["value"])) == exact(value)
    assert same_value(decode(report["value"]), value)


@given(st.binary(max_size=200))
def test_bytes_are_refused_or_read(data: bytes) -> None:
    with suppress(BadResultError):
        decode(read_report(data).get("value"))


JSON = st.recursive(
    st.none() | st.booleans() | st.text() | st.sampled_from(["i", "f", "l", "t", "s", "d", "b"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=2),
)


@given(JSON)
def test_any_json_is_refused_or_read(value: Any) -> None:
    with suppress(BadResultError):
        decode(value)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "nothing"),
        (b"[]", "not a report"),
        (b" " * (1 << 22), "too large"),
        (b'{"value":' + b"[" * 10**6, "nested too deeply"),
        (b'{"value":' + b'["l",[' * 200 + b"]]" * 200 + b"}", "nested too deeply"),
        (b'{"value":' + b"9" * 10**6 + b"}", "not JSON"),
        (b'{"value":1e999}', "not JSON"),
        (b'{"value":"\xff"}', "not JSON"),
        (b'{"value":{}}', "not a report"),
        (b'{"value":[' + b"[]," * 400_000 + b"[]]}", "larger than what is expected"),
        ('{"x":"\u2200","value":[]}'.encode("utf-16-le"), "not JSON"),
    ],
)
def test_reports_that_are_refused(data: bytes, message: str) -> None:
    with pytest.raises(BadResultError, match=message):
        read_report(data)


def test_brackets_in_strings_are_not_depth() -> None:
    text = '"\\' + "[{" * 10**5
    assert read_report(json.dumps({"value": text}).encode())["value"] == text


def test_hostile_reports_are_refused_in_linear_time() -> None:
    began = time.process_time()
    for data in (b'"' + b'\\"' * 10**6, b'"' * 10**6, b'{"' + b"\\" * 10**6, b"[]" * 10**6):
        with pytest.raises(BadResultError):
            read_report(data)
    assert time.process_time() - began < 20.0  # hours, were it not


@pytest.mark.parametrize(
    "value", [*read_table(__file__, "test_values_that_are_refused"), ["i", "f" * 10**6]]
)
def test_values_that_are_refused(value: Any) -> None:
    with pytest.raises(BadResultError):
        decode(value)


def test_nesting_is_bounded_where_values_are_encoded() -> None:
    value: list[Any] = []
    for _ in range(64):
        value = [value]
    assert decode(encode(value)) == value
    with pytest.raises(ValueError, match="too deeply"):
        encode([value])


@pytest.mark.parametrize(
    ("found", "expected", "same"),
    [
        *read_table(__file__, "test_outputs"),
        ("1" * 10**6, "1.5", False),
        ("1\n" * 10**6, "1", False),
    ],
)
def test_outputs(found: str, expected: str, same: bool) -> None:
    assert same_output(found, expected) is same


@pytest.mark.parametrize(
    ("found", "expected", "same"),
    [
        ({1: "a", "1": "a"}, {"1": "a"}, False),
        ({"a": 1}, {"a": 1, "b": 2}, False),
        ({True: 1}, {"true": 1}, True),
        (((1,), [2]), [[1], [2]], True),
        ([1], (1,), False),
        (float("nan"), float("nan"), True),
        (float("nan"), 1.0, False),
        (10**400, 1.0, False),
        (10**17 + 1, 10**17, False),
        (1e18, 10**18 + 7, False),
        (1.0, 1, True),
        (1.5, 1, False),
        (2.0**53, 2**53 + 1, False),
        ([1.0], [1], True),
        (1, 1.0, True),
        ({1.0}, {1}, True),
        ({1.5}, {1}, False),
        ({(1, "a"), 2.5}, {2.5, (1, "a")}, True),
        ({("i", "1")}, {1}, False),
        ({(1, 2): 3}, {(1, 2): 3.0}, True),
        ({("1", "2"): 3}, {(1, 2): 3}, False),
        ({10**5000: 1}, {"a": 1}, False),
        ({10**5000: 1}, {10**5000: 1}, True),
        ({None: 1}, {"null": 1}, False),
        (b"x", "x", False),
        (False, None, False),
    ],
)
def test_values(found: Any, expected: Any, same: bool) -> None:
    assert same_value(found, expected) is same


@pytest.mark.parametrize(
    ("found", "expected", "same"), read_table(__file__, "test_outputs_within_a_tolerance")
)
def test_outputs_within_a_tolerance(found: str, expected: str, same: bool) -> None:
    assert same_output(found, expected, 1e-6) is same


@pytest.mark.parametrize(
    ("found", "expected", "same"),
    [
        (0.333333, 1 / 3, True),
        (0.3333, 1 / 3, False),
        ([(0.333333, {"a": 0.25})], [[1 / 3, {"a": 0.2500001}]], True),
        ([(0.333333, {"a": 0.25})], [[1 / 3, {"a": 0.2501}]], False),
        (3.0000001, 3, False),
        (3, 3.0000001, True),
        ("0.333333", "0.3333333", False),
        (True, 1.0, False),
    ],
)
def test_values_within_a_tolerance(found: Any, expected: Any, same: bool) -> None:
    assert same_value(found, expected, 1e-6) is same


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (Pairs([(1, "a"), ((2,), None)]), "{1: 'a', (2,): None}"),
        (SetMembers([1, 2.5]), "{1, 2.5}"),
        ([10**5000], "[<an integer of 16610 bits>]"),
        ([1] * 40, f"[{'1, ' * 30}...]"),
        (Pairs([(n, n) for n in range(40)]), "..."),
    ],
)
def test_values_are_shown_in_a_line(value: Any, shown: str) -> None:
    assert shorten(value).endswith(shown if shown != "..." else ", ...}")
