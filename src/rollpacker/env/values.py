"""Values checked against JSON schemas, as far as those of tools go."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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


def wanted(schema: Any, value: Any) -> str | None:
    """What a value should have been; None if it is, or where the schema is none that is known."""
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
    """The first thing wrong inside of a list or an object."""
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
