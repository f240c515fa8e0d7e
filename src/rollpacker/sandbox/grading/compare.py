"""Compares what a program gave with what was expected, in the trainer's process."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from decimal import Decimal
from itertools import repeat
from typing import Any

from rollpacker.sandbox.grading.decode import Pairs, SetMembers
from rollpacker.sandbox.types import FLOAT_TOLERANCE

_LONGEST_NUMBER = 64
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,4})?")
_INTEGER = re.compile(r"[+-]?[0-9]+")
_WHOLE = re.compile(r"[+-]?[0-9]+\.0*")
# Digits, in all or behind the point, from which on a number may be a rounded one.
_ROUNDED = 5
# A float tells integers apart up to here.
_EXACT = 2.0**53
# Bits of a key; Python writes any integer of them in decimals, and quickly.
_LONGEST_KEY = 2000
# A flood of lines is not worth splitting.
_LONGER, _SLACK = 16, 1 << 16


def same_output(found: str, expected: str, tolerance: float | None = None) -> bool:
    """Whether two texts are equal line by line, but for white space around words and blank lines
    behind the first.

    Where the expected token is a number with a point or an exponent, ``tolerance`` is near enough,
    absolute or relative; None stands for 1e-6, and for the digits of the token where it has five.
    Where it is an integer, only that integer is equal, with zeros behind a point too, and, with a
    tolerance given, a number with a point or an exponent that is absolutely as near.
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
    # One that is near to a large integer is another integer.
    wanted = float(expected)
    return abs(wanted) < _EXACT and abs(float(found) - wanted) <= tolerance


def _near(found: float, expected: float, tolerance: float | None, text: str) -> bool:
    """Within the tolerance, or what the text of the expected number is when it is rounded."""
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
    """Whether a decoded value equals the expected one.

    Types must be equal, with what JSON cannot say allowed: a tuple where a list is expected, a
    number as a dict's key where its text is. Floats may differ as in ``same_output``, and an
    integer may stand for a float; a float for an integer where it equals it exactly, as Python and
    the public harnesses have it. A boolean is no number.
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
    """As JSON writes it, where it can. Numbers are never hashed as such: they may collide."""
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
    """The same for equal values of one type, and hashed by text alone."""
    if isinstance(value, tuple):
        return ("t", *map(_exact, value))
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return ("i", f"{value:x}") if isinstance(value, int) else ("f", value.hex())
