"""Functions as tools: their JSON schemas, and arguments checked against them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from transformers.utils.chat_template_utils import get_json_schema

Schema = dict[str, Any]

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


def schema_of(function: Callable[..., Any], where: str) -> Schema:
    """The schema of a function with type hints and a docstring that describes its arguments.

    Raises ``ValueError`` that begins with ``where`` and says what it lacks.
    """
    name = getattr(function, "__name__", type(function).__name__)
    if inspect.isclass(function):
        raise ValueError(f"{where}: {name} is a class: a tool is a function")
    unnamed = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)
    any_name = inspect.Parameter.VAR_KEYWORD
    try:
        for parameter in inspect.signature(function).parameters.values():
            if parameter.kind in unnamed or parameter.kind is any_name:
                raise ValueError(f"its argument {parameter.name} cannot be given by name")
        return get_json_schema(function)
    except Exception as error:  # of several kinds, and hints may be of any code
        reason = " ".join(str(error).split())
        raise ValueError(f"{where}: {name} cannot be a tool: {reason}") from error


def mistake(schema: Schema, arguments: Mapping[str, Any]) -> str | None:
    """What is wrong with the arguments of a call, for the model; None if nothing is."""
    parameters = schema["function"]["parameters"]
    known: dict[str, Any] = parameters.get("properties", {})
    for name in arguments:
        if name not in known:
            takes = f"it takes {', '.join(known)}" if known else "it takes none"
            return f"there is no argument {name!r:.100}: {takes}"
    missing = [name for name in parameters.get("required", ()) if name not in arguments]
    if missing:
        return f"the argument {missing[0]!r} is missing"
    for name, value in arguments.items():
        wanted = _wanted(known[name], value)
        if wanted is not None:
            return f"the argument {name!r} must be {wanted}"
    return None


def _wanted(schema: Mapping[str, Any], value: Any) -> str | None:
    """What a value should have been; None if it is."""
    if value is None and schema.get("nullable"):
        return None
    if "anyOf" in schema:
        wanted = [_wanted(each, value) for each in schema["anyOf"]]
        return None if None in wanted else " or ".join(str(each) for each in wanted)
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
        found = (_wanted(part, item) for part, item in zip(each, value, strict=True))
        return next((f"a list whose items are {what}" for what in found if what), None)
    if isinstance(value, dict) and isinstance(schema.get("additionalProperties"), Mapping):
        found = (_wanted(schema["additionalProperties"], item) for item in value.values())
        return next((f"an object whose values are {what}" for what in found if what), None)
    return None
