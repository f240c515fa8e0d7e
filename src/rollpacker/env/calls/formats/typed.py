"""Arguments that are written as plain text: what they are is in the tool's schema."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rollpacker.env.calls.values import too_deep, wanted

Tools = Sequence[Mapping[str, Any]]

_WORDS = {"true": True, "false": False, "null": None, "none": None}
"""As JSON and as templates of Python write them."""
_SAYS = {"type", "anyOf", "oneOf", "enum"}
"""What of a schema tells text from other values."""


def schemas_of(name: str, tools: Tools) -> Mapping[str, Any]:
    """Of a tool's arguments; empty where nothing is known of them."""
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and function.get("name") == name:
            parameters = function.get("parameters")
            found = parameters.get("properties") if isinstance(parameters, Mapping) else None
            return found if isinstance(found, Mapping) else {}
    return {}


def typed(text: str, schema: Any) -> Any:
    """What a written argument is: what its schema takes, else text, with which the tool's check
    finds fault. Where a schema does not say, an object or a list is one, and all else text."""
    if not isinstance(schema, Mapping) or not schema:
        return text
    value = _value(text.strip())
    if not _SAYS.intersection(schema):
        return value if isinstance(value, list | dict) else text
    # What is text in JSON too is text as it was written, quotes and all.
    return text if isinstance(value, str) or wanted(schema, value) else value


def _value(text: str) -> Any:
    word = text.lower()
    if word in _WORDS:
        return _WORDS[word]
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return text if too_deep(value) else value
