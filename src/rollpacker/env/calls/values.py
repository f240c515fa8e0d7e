"""Values of users' code: arguments checked against JSON schemas, results as text, numbers."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence, Set, ValuesView
from datetime import date, time, timedelta
from decimal import Decimal
from enum import Enum
from pathlib import PurePath
from typing import Any
from uuid import UUID

_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}
_NUMBERS = ("integer", "number")
_DEEPEST = 64  # nesting of lists and objects: code that handles them may be recursive


def too_deep(value: Any) -> bool:
    """Return whether lists and objects of JSON are nested too deep."""
    level = [value]
    for _ in range(_DEEPEST):
        level = [each for outer in level for each in _parts(outer)]
        if not level:
            return False
    return True


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def wanted(schema: Any, value: Any) -> str | None:
    """Return the type that a value lacks, or None if it fits, or if the schema is unknown."""
    if not isinstance(schema, Mapping):
        return None
    known: Mapping[str, Any] = schema
    if value is None and known.get("nullable"):
        return None
    for key in ("anyOf", "oneOf"):
        if isinstance(known.get(key), list):
            each = [wanted(one, value) for one in known[key]]
            return None if None in each else " or ".join(map(str, each))
    if isinstance(known.get("enum"), list):
        same = any(value == each and type(value) is type(each) for each in known["enum"])
        return None if same else f"one of {', '.join(map(repr, known['enum']))}"
    kinds = known.get("type") or []
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds and not any(_is(kind, value) for kind in kinds):
        return f"of type {' or '.join(kinds)}"
    return _inside(known, value)


def _is(kind: str, value: Any) -> bool:
    if isinstance(value, bool) and kind in _NUMBERS:
        return False
    return isinstance(value, _TYPES.get(kind, (object,)))


def _inside(schema: Mapping[str, Any], value: Any) -> str | None:
    if isinstance(value, list):
        return _items(schema, value)
    if isinstance(value, dict) and isinstance(schema.get("additionalProperties"), Mapping):
        found = (wanted(schema["additionalProperties"], item) for item in value.values())
        return next((f"an object whose values are {what}" for what in found if what), None)
    return None


def _items(schema: Mapping[str, Any], value: list[Any]) -> str | None:
    each = schema.get("prefixItems")
    if not isinstance(each, list) or not each:
        each = [schema.get("items")] * len(value)
    if len(each) != len(value):
        return f"a list of {len(each)}"
    found = (wanted(part, item) for part, item in zip(each, value, strict=True))
    return next((f"a list whose items are {what}" for what in found if what), None)


# Results -----------------------------------------------------------------------------------------

_SPELLED = (date, time)  # ``isoformat`` writes them, as usual in JSON
_NAMED = (timedelta, UUID, PurePath, Decimal)
_BYTES = (bytes, bytearray, memoryview)
_PLAIN = (str, int, float, type(None))


class NoTextError(TypeError):
    """A value is no text and has no obvious JSON form. The message names its type."""


def as_text(value: Any) -> str:
    """Return a value as text for the model: text as it is, any other value as JSON.

    Numbers and arrays of other libraries, decimals, dates, sets, text in bytes and objects with
    fields are converted. Raises ``NoTextError``, and ``ValueError`` on a value that contains
    itself.
    """
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False)
    except TypeError:
        pass
    try:
        plain = _as_json(value)
    except RecursionError:
        raise NoTextError(f"{type(value).__name__}, nested too deep") from None
    return plain if isinstance(plain, str) else json.dumps(plain, ensure_ascii=False)


def shown(value: Any) -> str:
    """Return ``as_text`` for observations, with ``str`` for values without a JSON form."""
    try:
        return as_text(value)
    except NoTextError:
        return json.dumps(value, ensure_ascii=False, default=str)


def _as_json(value: Any) -> Any:
    if isinstance(value, Enum):
        return _as_json(value.value)
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Mapping):
        return {_key(key): _as_json(each) for key, each in value.items()}
    if isinstance(value, _BYTES):
        return _decoded(value)
    if isinstance(value, Set):
        return [_as_json(each) for each in _ordered(value)]
    if isinstance(value, Sequence | ValuesView):
        return [_as_json(each) for each in value]
    return _scalar(value)


def _scalar(value: Any) -> Any:
    if isinstance(value, _SPELLED):
        return value.isoformat()
    if isinstance(value, _NAMED):
        return str(value)
    if not isinstance(value, type):
        if dataclasses.is_dataclass(value):
            fields = dataclasses.fields(value)
            return {field.name: _as_json(getattr(value, field.name)) for field in fields}
        for method in ("model_dump", "tolist"):  # pydantic's; numpy's and torch's
            if callable(made := getattr(value, method, None)):
                return _as_json(made())
    raise NoTextError(type(value).__name__)


def _key(key: Any) -> Any:
    return key if isinstance(key, _PLAIN) and not isinstance(key, Enum) else as_text(key)


def _decoded(value: Any) -> str:
    try:
        return bytes(value).decode()
    except UnicodeDecodeError:
        raise NoTextError(f"{type(value).__name__} that are no text") from None


def _ordered(values: Set[Any]) -> list[Any]:
    # The same order in every process, although their hashes of text differ.
    try:
        return sorted(values)
    except TypeError:
        return sorted(values, key=repr)


# Numbers -----------------------------------------------------------------------------------------


def number(value: Any) -> float | None:
    """Return a finite number of any library, a boolean or an array of one number as a float. None
    for all other values, text included."""
    if isinstance(value, str | bytes):
        return None
    try:
        one = value.item() if callable(getattr(value, "item", None)) else value
        found = float(one)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # torch raises the last
        return None
    return found if math.isfinite(found) else None
