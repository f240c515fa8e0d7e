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


def wanted(schema: Mapping[str, Any], value: Any) -> str | None:
    """What a value should have been; None if it is."""
    if value is None and schema.get("nullable"):
        return None
    if "anyOf" in schema:
        each = [wanted(one, value) for one in schema["anyOf"]]
        return None if None in each else " or ".join(map(str, each))
    if "enum" in schema:
        same = any(value == each and type(value) is type(each) for each in schema["enum"])
        return None if same else f"one of {', '.join(map(repr, schema['enum']))}"
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds and not any(_is(kind, value) for kind in kinds):
        return f"of type {' or '.join(kinds)}"
    return _inside(schema, value)


def _is(kind: str, value: Any) -> bool:
    if isinstance(value, bool) and kind in _NUMBERS:
        return False
    return isinstance(value, _TYPES.get(kind, (object,)))


def _inside(schema: Mapping[str, Any], value: Any) -> str | None:
    """The first thing wrong inside of a list or an object."""
    if isinstance(value, list):
        each = schema.get("prefixItems") or [schema.get("items", {})] * len(value)
        if len(each) != len(value):
            return f"a list of {len(each)}"
        found = (wanted(part, item) for part, item in zip(each, value, strict=True))
        return next((f"a list whose items are {what}" for what in found if what), None)
    if isinstance(value, dict) and isinstance(schema.get("additionalProperties"), Mapping):
        found = (wanted(schema["additionalProperties"], item) for item in value.values())
        return next((f"an object whose values are {what}" for what in found if what), None)
    return None
