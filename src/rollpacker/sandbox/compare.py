"""Compares what a program gave with what was expected, in the trainer's process."""

from __future__ import annotations

import math
from typing import Any, TypeGuard

_TOLERANCE = 1e-9
_LONGEST_NUMBER = 64
# A flood of lines is not worth splitting.
_LONGER, _SLACK = 16, 1 << 16


def same_output(found: str, expected: str) -> bool:
    """Whether two texts are equal line by line, but for trailing white space.

    Where the expected token is a number with a point or an exponent, 1e-9 is near enough.
    """
    if len(found) > _LONGER * len(expected) + _SLACK:
        return False
    ours, theirs = _lines(found), _lines(expected)
    if len(ours) != len(theirs):
        return False
    return all(
        a == b or _same_tokens(a.split(), b.split()) for a, b in zip(ours, theirs, strict=True)
    )


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _same_tokens(found: list[str], expected: list[str]) -> bool:
    if len(found) != len(expected):
        return False
    return all(a == b or _same_number(a, b) for a, b in zip(found, expected, strict=True))


def _same_number(found: str, expected: str) -> bool:
    if len(found) > _LONGEST_NUMBER or not any(mark in expected for mark in ".eE"):
        return False
    try:
        return _near(float(found), float(expected))
    except ValueError:
        return False


def _near(found: float, expected: float) -> bool:
    return math.isclose(found, expected, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)


def same_value(found: Any, expected: Any) -> bool:
    """Whether a decoded value equals the expected one.

    Types must be equal, with what JSON cannot say allowed: a tuple where a list is expected, a
    number as a dict's key where its text is. Floats may differ by 1e-9, and an integer may stand
    for a float; a boolean is no number.
    """
    if isinstance(found, tuple) and isinstance(expected, list | tuple):
        return same_value(list(found), list(expected))
    if _is_number(found) and _is_number(expected):
        return _same_numbers(found, expected)
    return type(found) is type(expected) and _same_of_type(found, expected)


def _same_of_type(found: Any, expected: Any) -> bool:
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(same_value, found, expected))
    if isinstance(expected, dict):
        return _same_dict(found, expected)
    return found == expected


def _is_number(value: Any) -> TypeGuard[float]:
    return type(value) in (int, float)


def _same_numbers(found: float, expected: float) -> bool:
    if isinstance(found, int) and isinstance(expected, int):
        return found == expected
    if isinstance(found, float) and isinstance(expected, float) and math.isnan(expected):
        return math.isnan(found)
    try:
        return _near(float(found), float(expected))
    except OverflowError:
        return False


def _same_dict(found: dict[Any, Any], expected: dict[Any, Any]) -> bool:
    ours = {_key(key): value for key, value in found.items()}
    theirs = {_key(key): value for key, value in expected.items()}
    if not (len(ours) == len(found) == len(theirs)) or ours.keys() != theirs.keys():
        return False
    return all(same_value(ours[key], value) for key, value in theirs.items())


def _key(key: Any) -> Any:
    """As JSON writes it."""
    if isinstance(key, bool):
        return "true" if key else "false"
    return str(key) if _is_number(key) else key
