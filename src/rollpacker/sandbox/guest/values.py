"""Values as typed JSON.

``None``, booleans and strings stand for themselves. Every other value is a list of a type's letter
and its content. Integers and floats are hexadecimal: exact, and read in linear time.
"""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from typing import Any

_DEPTH = 64
_SETS = (set, frozenset, type({}.keys()))


def encode(value: Any, depth: int = _DEPTH) -> Any:
    """Return a value as JSON. Raises ``TypeError`` on other types, ``ValueError`` beyond
    ``depth``."""
    if depth < 0:
        raise ValueError("the value is nested too deeply")
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return ["i", format(int(value), "x")]
    if isinstance(value, float | Decimal | Fraction):
        return ["f", float(value).hex()]
    return _encode_collection(value, depth - 1)


def _encode_collection(value: Any, depth: int) -> Any:
    if isinstance(value, dict):
        pairs = [[encode(key, depth), encode(item, depth)] for key, item in value.items()]
        return ["d", pairs]
    if isinstance(value, list):
        return ["l", [encode(item, depth) for item in value]]
    if isinstance(value, tuple):
        return ["t", [encode(item, depth) for item in value]]
    if isinstance(value, _SETS):
        return ["s", [encode(item, depth) for item in value]]
    if isinstance(value, bytes | bytearray):
        return ["b", bytes(value).hex()]
    kind = type(value).__name__
    raise TypeError(f"a {kind} cannot be returned: expected JSON types, tuple, set or bytes")
