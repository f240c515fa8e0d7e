"""Reads what a program returned: typed JSON, its size, depth and types checked."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np

_DEPTH = 300
_LARGEST = 2 << 20
# An unfinished string goes to the end, or every quote in it would be tried again.
_STRINGS = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)', re.DOTALL)
_INTEGER_DIGITS = 20_000
_HEX = re.compile(r"-?[0-9a-f]+")


class BadResultError(Exception):
    """The program returned something else than a value of the format."""


def read_report(data: bytes) -> dict[str, Any]:
    """The harness's report. Raises ``BadResultError``."""
    if not data:
        raise BadResultError("it returned nothing")
    if len(data) > _LARGEST:
        raise BadResultError("its result is too large")
    _check_depth(data)
    try:
        report = json.loads(data, parse_int=_no_number, parse_float=_no_number)
    except (ValueError, RecursionError) as error:
        raise BadResultError("its result is not JSON") from error
    if not isinstance(report, dict):
        raise BadResultError("its result is not a report")
    return report


def _no_number(text: str) -> Any:
    raise ValueError(f"a plain number: {text[:20]}")


def _check_depth(data: bytes) -> None:
    # A parser goes as deep as its input, on a stack that may be the trainer's.
    brackets = np.frombuffer(_STRINGS.sub(b"", data), dtype=np.uint8)
    opens = np.isin(brackets, np.frombuffer(b"[{", dtype=np.uint8)).astype(np.int32)
    closes = np.isin(brackets, np.frombuffer(b"]}", dtype=np.uint8)).astype(np.int32)
    if np.cumsum(opens - closes).max(initial=0) > _DEPTH:
        raise BadResultError("its result is nested too deeply")


def decode(value: Any) -> Any:
    """A value of exact builtin types from ``guest.values.encode``. Raises ``BadResultError``."""
    if value is None or isinstance(value, bool | str):
        return value
    if not (isinstance(value, list) and len(value) == 2 and isinstance(value[0], str)):
        raise BadResultError("its result has a value of no known type")
    kind, content = value
    if kind in ("i", "f", "b"):
        return _decode_scalar(kind, content)
    if not isinstance(content, list):
        raise BadResultError("its result has a collection without items")
    if kind == "d":
        return _decode_dict(content)
    if kind not in _COLLECTIONS:
        raise BadResultError("its result has a collection of no known type")
    try:
        return _COLLECTIONS[kind](decode(item) for item in content)
    except TypeError as error:
        raise BadResultError("its result has a set of unhashable items") from error


_COLLECTIONS: dict[str, Any] = {"l": list, "t": tuple, "s": set}


def _decode_scalar(kind: str, content: Any) -> int | float | bytes:
    if not isinstance(content, str):
        raise BadResultError("its result has a scalar without text")
    try:
        if kind == "f":
            return float.fromhex(content)
        if kind == "b":
            return bytes.fromhex(content)
    except (ValueError, OverflowError) as error:
        raise BadResultError("its result has a malformed scalar") from error
    if len(content) > _INTEGER_DIGITS or not _HEX.fullmatch(content):
        raise BadResultError("its result has an integer that is too large or malformed")
    return int(content, 16)


def _decode_dict(content: list[Any]) -> dict[Any, Any]:
    pairs: list[tuple[Any, Any]] = []
    for item in content:
        if not (isinstance(item, list) and len(item) == 2):
            raise BadResultError("its result has a malformed dict")
        pairs.append((decode(item[0]), decode(item[1])))
    try:
        return dict(pairs)
    except TypeError as error:
        raise BadResultError("its result has a dict with unhashable keys") from error
