"""Calls with a tag for each argument. Values are plain text, and the tool's schema gives their
types."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rollpacker.env.calls.call import BadCall, Call, Calls, Parsed, between
from rollpacker.env.calls.json_calls import OPEN, closed_at, next_place
from rollpacker.env.calls.values import too_deep, wanted

Tools = Sequence[Mapping[str, Any]]

_WORDS = {"true": True, "false": False, "null": None, "none": None}
"""In the notation of JSON and of Python's templates."""
_SAYS = {"type", "anyOf", "oneOf", "enum"}
"""Keys of a schema that distinguish text from other values."""


def schemas_of(name: str, tools: Tools) -> Mapping[str, Any]:
    """Return the schemas of a tool's arguments, empty if they are unknown."""
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and function.get("name") == name:
            parameters = function.get("parameters")
            found = parameters.get("properties") if isinstance(parameters, Mapping) else None
            return found if isinstance(found, Mapping) else {}
    return {}


def typed(text: str, schema: Any) -> Any:
    """Convert a written argument to the type in its schema, else keep the text for the tool's
    check.

    If the schema has no type, an object or a list is converted, and any other value is text.
    """
    if not isinstance(schema, Mapping) or not schema:
        return text
    value = _value(text.strip())
    if not _SAYS.intersection(schema):
        return value if isinstance(value, list | dict) else text
    # A quoted text stays as it was written, with its quotes.
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


# Qwen3-Coder, Qwen3.5 and later, Nemotron 3: a tag for each argument.

_XML_BEGINS = re.compile(f"{OPEN}|(?=<function=)")  # some models leave the outer tag out

_FUNCTION = re.compile(r"\s*<function=([^<>\n]*)>")
_PARAMETER = re.compile(r"\s*<parameter=([^<>\n]*)>\n?")
_XML_VALUE = re.compile(r"((?:(?!<parameter=).)*?)\n?</parameter>", re.DOTALL)
_XML_UNCLOSED = re.compile(r"(.*?)\n?(?=<parameter=|</function>|</tool_call>|\Z)", re.DOTALL)
_XML_END = re.compile(r"\s*</function>")


class NoCallError(ValueError):
    """Text that was meant as a call is none. The message is one line for the model."""


@dataclass(frozen=True, slots=True)
class Written:
    """A call as it was written."""

    name: str
    arguments: dict[str, Any]
    end: int
    ended: bool


def qwen3_coder(text: str, start: int, tools: Tools) -> Parsed:
    """Parse nested tags."""
    return between(text, start, _XML_BEGINS, partial(_xml_outer, tools=tools))


def _xml_outer(text: str, start: int, tools: Tools) -> tuple[Calls, int]:
    outer = text.endswith(OPEN, 0, start)
    try:
        found = _xml_read(text, start, tools)
    except NoCallError as error:
        if not outer:
            return (), start + len("<function=")
        return (BadCall(str(error)),), next_place(text, start)
    if not (outer or found.ended or found.arguments):
        return (), found.end
    call, closed = Call(found.name, found.arguments), closed_at(text, found.end)
    if closed is None and outer:
        bad = BadCall("text stands between the parts of the call")
        return (bad,), next_place(text, found.end)
    return (call,), found.end if closed is None else closed


def _xml_read(text: str, start: int, tools: Tools) -> Written:
    # Raises ``NoCallError``. Models forget closing tags, so a value also ends at the next parameter
    # and at the call's end.
    function = _FUNCTION.match(text, start)
    if function is None:
        raise NoCallError("the call must begin with <function=NAME>")
    name = function[1].strip()
    if not name:
        raise NoCallError("the call has no name: <function=NAME>")
    schemas = schemas_of(name, tools)
    arguments: dict[str, Any] = {}
    place = function.end()
    while (parameter := _PARAMETER.match(text, place)) is not None:
        value = _XML_VALUE.match(text, parameter.end()) or _XML_UNCLOSED.match(
            text, parameter.end()
        )
        assert value is not None
        key = parameter[1].strip()
        arguments[key] = typed(value[1], schemas.get(key))
        place = value.end()
    end = _XML_END.match(text, place)
    return Written(name, arguments, place if end is None else end.end(), end is not None)


# GLM-4.5 and later: a tag for each argument's name, and one for its value; GLM-4.7 writes no line
# breaks between them.

_GLM_BEGINS = re.compile(OPEN)
_GLM_NAME = re.compile(r"\s*([^\s<>{}\[\]\"]+)(?=\s*(?:<arg_key>|</tool_call>|<tool_call>|\Z))")
_GLM_KEY = re.compile(r"\s*<arg_key>([^<>]*)</arg_key>\s*<arg_value>")
_GLM_VALUE = re.compile(r"((?:(?!<arg_key>).)*?)</arg_value>", re.DOTALL)
_GLM_UNCLOSED = re.compile(r"(.*?)(?=<arg_key>|</tool_call>|<tool_call>|\Z)", re.DOTALL)


def glm(text: str, start: int, tools: Tools) -> Parsed:
    """Parse tags, and a name without one."""
    return between(text, start, _GLM_BEGINS, partial(_glm_read, tools=tools))


def _glm_read(text: str, start: int, tools: Tools) -> tuple[Calls, int]:
    # Models forget closing tags, so a value also ends at the next argument and at the call's end.
    head = _GLM_NAME.match(text, start)
    if head is None:
        bad = BadCall("the call must begin with the name of a tool, and go on with <arg_key>")
        return (bad,), next_place(text, start)
    schemas = schemas_of(head[1], tools)
    arguments: dict[str, Any] = {}
    place = head.end()
    while (key := _GLM_KEY.match(text, place)) is not None:
        name = key[1].strip()
        value, place = _glm_value(text, key.end())
        arguments[name] = typed(value, schemas.get(name))
    closed = closed_at(text, place)
    if closed is None:
        bad = BadCall(
            "an argument of the call must be <arg_key>NAME</arg_key><arg_value>VALUE</arg_value>",
            head[1],
        )
        return (bad,), next_place(text, place)
    return (Call(head[1], arguments),), closed


def _glm_value(text: str, start: int) -> tuple[str, int]:
    if (closed := _GLM_VALUE.match(text, start)) is not None:
        return closed[1], closed.end()
    unclosed = _GLM_UNCLOSED.match(text, start)
    assert unclosed is not None
    return unclosed[1].rstrip(), unclosed.end()
