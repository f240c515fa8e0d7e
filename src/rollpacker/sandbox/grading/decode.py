"""Reads what a program returned: typed JSON, its size, depth and types checked.

It takes time in proportion to its bytes, whatever they are: nothing in it is hashed but text.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Callable, Collection, Iterable
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

_DEPTH = 300
_LARGEST = 2 << 20
_INTEGER_DIGITS = 20_000
FEW_MARKS = 16
"""More brackets and commas than a report without a value has: {"error":"..."}."""
# A list of 200,000 numbers has fewer.
_MOST_MARKS = 700_000
_PLAIN = (type(None), bool, str)


Bytes = npt.NDArray[np.uint8]
Bits = npt.NDArray[np.bool_]


class BadResultError(Exception):
    """The program returned something else than a value of the format."""


class Pairs(list[tuple[Any, Any]]):
    """A dict, not hashed: a program may have chosen keys that collide."""

    def items(self) -> Pairs:
        """As of a dict."""
        return self


class SetMembers(list[Any]):
    """A set, not hashed."""


def most_marks(expected: Any) -> int:
    """The most brackets and commas that a report of a value like the expected one has."""
    return min(FEW_MARKS + _marks(expected), _MOST_MARKS)


def _marks(value: Any) -> int:
    """Those of a value, its own comma included."""
    if isinstance(value, dict):
        return 5 + 5 * len(value) + _marks_in(value) + _marks_in(value.values())
    return 5 + _marks_in(value) if isinstance(value, _SEVERAL) else 3


def _marks_in(values: Collection[Any]) -> int:
    if any(issubclass(kind, _SEVERAL) for kind in set(map(type, values))):
        return sum(map(_marks, values))
    return 3 * len(values)


_SEVERAL = (list, tuple, set, dict)


def read_report(data: bytes, most: int = _MOST_MARKS) -> dict[str, Any]:
    """The harness's report.

    Args:
        data: its bytes.
        most: brackets and commas that it may have: what has more is not worth reading.

    Raises ``BadResultError``.
    """
    if not data:
        raise BadResultError("it returned nothing")
    if len(data) > _LARGEST:
        raise BadResultError("its result is too large")
    _check_shape(data, most)
    try:
        # As UTF-8 only: in another encoding, the shape would be another.
        report = json.loads(data.decode(), parse_int=_no_number, parse_float=_no_number)
    except (ValueError, RecursionError) as error:
        raise BadResultError("its result is not JSON") from error
    if not isinstance(report, dict):
        raise BadResultError("its result is not a report")
    return report


def _no_number(text: str) -> Any:
    raise ValueError(f"a plain number: {text[:20]}")


def _check_shape(data: bytes, most: int) -> None:
    outside = _without_strings(data)
    objects = np.count_nonzero(outside == ord("{"))
    opens = (outside == ord("[")) | (outside == ord("{"))
    opened = np.count_nonzero(opens)
    # A parser goes as deep as its input, on a stack that may be the trainer's.
    if opened > _DEPTH and _depth(outside, opens) > _DEPTH:
        raise BadResultError("its result is nested too deeply")
    if objects > 1:
        raise BadResultError("its result is not a report")
    if opened + np.count_nonzero(outside == ord(",")) > most:
        raise BadResultError("its result is larger than what is expected")


def _without_strings(data: bytes) -> Bytes:
    bare = data
    if b"\\" in data:
        bare = data.replace(rb"\\", b"").replace(rb"\"", b"")
    found = np.frombuffer(bare, dtype=np.uint8)
    # Only its last bit counts: inside of a string, or not.
    quotes = np.cumsum(found == ord('"'), dtype=np.uint8)
    return found[(quotes & 1) == 0]


def _depth(outside: Bytes, opens: Bits) -> int:
    closes = (outside == ord("]")) | (outside == ord("}"))
    return int(np.cumsum(opens.view(np.int8) - closes.view(np.int8), dtype=np.int32).max(initial=0))


def decode(value: Any) -> Any:
    """A value of exact builtin types from ``guest.values.encode``, with ``Pairs`` and
    ``SetMembers`` for dicts and sets. Raises ``BadResultError``."""
    if type(value) in _PLAIN:
        return value
    if not (isinstance(value, list) and len(value) == 2 and isinstance(value[0], str)):
        raise BadResultError("its result has a value of no known type")
    kind, content = value
    if kind in _SCALARS:
        return _scalar(_SCALARS[kind], content)
    if not isinstance(content, list):
        raise BadResultError("its result has a collection without items")
    if kind == "d":
        return Pairs([_pair(item) for item in content])
    if kind not in _COLLECTIONS:
        raise BadResultError("its result has a collection of no known type")
    items = _COLLECTIONS[kind]([decode(item) for item in content])
    if kind == "s" and not all(map(_is_hashable, items)):
        raise BadResultError("its result has a set of unhashable items")
    return items


_COLLECTIONS: dict[str, Any] = {"l": list, "t": tuple, "s": SetMembers}


def _pair(item: Any) -> tuple[Any, Any]:
    if not (isinstance(item, list) and len(item) == 2):
        raise BadResultError("its result has a malformed dict")
    key, value = decode(item[0]), decode(item[1])
    if not _is_hashable(key):
        raise BadResultError("its result has a dict with unhashable keys")
    return key, value


def _is_hashable(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_hashable, value))
    return not isinstance(value, list)


def _scalar(read: Callable[[str], int | float | bytes], text: Any) -> int | float | bytes:
    try:
        return read(text)
    except (TypeError, ValueError, OverflowError) as error:
        raise BadResultError("its result has a malformed scalar") from error


def _integer(text: str) -> int:
    if len(text) > _INTEGER_DIGITS:
        raise BadResultError("its result has an integer that is too large")
    value = int(text, 16)
    if f"{value:x}" != text:
        raise ValueError(text[:20])
    return value


_SCALARS: dict[str, Callable[[str], int | float | bytes]] = {
    "i": _integer,
    "f": float.fromhex,
    "b": bytes.fromhex,
}


class _Brief(reprlib.Repr):
    """Takes time by what it shows, not by the value."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring, self.maxother = 6, 120, 120
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = 30

    def repr_int(self, x: int, level: int) -> str:  # noqa: ARG002
        """As it is, unless its decimals would take long."""
        bits = x.bit_length()
        return repr(x) if bits < _SHOWN_BITS else f"<an integer of {bits} bits>"

    def repr_Pairs(self, x: Pairs, level: int) -> str:  # noqa: N802
        """As of a dict."""
        return self._first(f"{self._one(k, level)}: {self._one(v, level)}" for k, v in x)

    def repr_SetMembers(self, x: SetMembers, level: int) -> str:  # noqa: N802
        """As of a set."""
        return self._first(self._one(each, level) for each in x)

    def _one(self, value: Any, level: int) -> str:
        return self.repr1(value, level - 1) if level > 0 else "..."

    def _first(self, shown: Iterable[str]) -> str:
        first = list(islice(shown, self.maxdict + 1))
        rest = ["..."] * (len(first) > self.maxdict)
        return f"{{{', '.join([*first[: self.maxdict], *rest])}}}"


_SHOWN_BITS = 400
_brief = _Brief()


def shorten(value: Any) -> str:
    """How a value is shown in a line, decoded or from a row."""
    return _brief.repr(value)
