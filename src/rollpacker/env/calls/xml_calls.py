"""Calls as Qwen3-Coder, Qwen3.5 and later, and Nemotron 3 write them: a tag for each argument.

Arguments are plain text there, and what they are is in the tool's schema: see ``typed``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollpacker.env.calls.values import too_deep, wanted

Tools = Sequence[Mapping[str, Any]]

_FUNCTION = re.compile(r"\s*<function=([^<>\n]*)>")
_PARAMETER = re.compile(r"\s*<parameter=([^<>\n]*)>\n?")
_VALUE = re.compile(r"((?:(?!<parameter=).)*?)\n?</parameter>", re.DOTALL)
_UNCLOSED = re.compile(r"(.*?)\n?(?=<parameter=|</function>|</tool_call>|\Z)", re.DOTALL)
_END = re.compile(r"\s*</function>")
_WORDS = {"true": True, "false": False, "null": None, "none": None}
"""As JSON and as templates of Python write them."""
_SAYS = {"type", "anyOf", "oneOf", "enum"}
"""What of a schema tells text from other values."""


class NoCallError(ValueError):
    """What was meant as a call is none; one line for the model."""


@dataclass(frozen=True, slots=True)
class Written:
    """A call as it was written.

    Args:
        name: of the tool.
        arguments: by name.
        end: of the call in the text.
        ended: whether the model has ended it.
    """

    name: str
    arguments: dict[str, Any]
    end: int
    ended: bool


def read(text: str, start: int, tools: Tools) -> Written:
    """The call at ``start``. Raises ``NoCallError``.

    Models forget ends: a value also ends where the next one begins, or the call does.
    """
    function = _FUNCTION.match(text, start)
    if function is None:
        raise NoCallError("the call must begin with <function=NAME>")
    name = function[1].strip()
    if not name:
        raise NoCallError("the call has no name: <function=NAME>")
    schemas = _schemas(name, tools)
    arguments: dict[str, Any] = {}
    place = function.end()
    while (parameter := _PARAMETER.match(text, place)) is not None:
        value = _VALUE.match(text, parameter.end()) or _UNCLOSED.match(text, parameter.end())
        assert value is not None
        key = parameter[1].strip()
        arguments[key] = typed(value[1], schemas.get(key))
        place = value.end()
    end = _END.match(text, place)
    return Written(name, arguments, place if end is None else end.end(), end is not None)


def _schemas(name: str, tools: Tools) -> Mapping[str, Any]:
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


def write(name: str, arguments: Mapping[str, Any]) -> str:
    """A call as the templates have it."""
    lines = [f"<parameter={key}>\n{_text(value)}\n</parameter>" for key, value in arguments.items()]
    return "\n".join([f"<function={name}>", *lines, "</function>"])


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list | dict):
        return json.dumps(value, ensure_ascii=False)
    return str(value)
