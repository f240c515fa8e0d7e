"""Calls as GLM-4.5 and later write them: a tag for each argument's name, and one for its value.

Values are text as it is, all else JSON; what they are is in the tool's schema. GLM-4.7 writes the
same without line breaks.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

from rollpacker.env.calls.call import BadCall, Call, Parsed
from rollpacker.env.calls.formats.json_calls import CLOSE, OPEN, closed_at, next_place
from rollpacker.env.calls.formats.scan import Calls, as_json, between
from rollpacker.env.calls.formats.typed import Tools, schemas_of, typed

_BEGINS = re.compile(OPEN)
_NAME = re.compile(r"\s*([^\s<>{}\[\]\"]+)(?=\s*(?:<arg_key>|</tool_call>|<tool_call>|\Z))")
_KEY = re.compile(r"\s*<arg_key>([^<>]*)</arg_key>\s*<arg_value>")
_VALUE = re.compile(r"((?:(?!<arg_key>).)*?)</arg_value>", re.DOTALL)
_UNCLOSED = re.compile(r"(.*?)(?=<arg_key>|</tool_call>|<tool_call>|\Z)", re.DOTALL)


def glm(text: str, start: int, tools: Tools) -> Parsed:
    """Tags, and a name without one."""
    return between(text, start, _BEGINS, partial(_read, tools=tools))


def _read(text: str, start: int, tools: Tools) -> tuple[Calls, int]:
    """Models forget ends: a value also ends where the next argument begins, or the call does."""
    head = _NAME.match(text, start)
    if head is None:
        bad = BadCall("the call must begin with the name of a tool, and go on with <arg_key>")
        return (bad,), next_place(text, start)
    schemas = schemas_of(head[1], tools)
    arguments: dict[str, Any] = {}
    place = head.end()
    while (key := _KEY.match(text, place)) is not None:
        name = key[1].strip()
        value, place = _value(text, key.end())
        arguments[name] = typed(value, schemas.get(name))
    closed = closed_at(text, place)
    if closed is None:
        bad = BadCall(
            "an argument of the call must be <arg_key>NAME</arg_key><arg_value>VALUE</arg_value>",
            head[1],
        )
        return (bad,), next_place(text, place)
    return (Call(head[1], arguments),), closed


def _value(text: str, start: int) -> tuple[str, int]:
    """The text of a value, and where it ends; one that is not closed has no white space there."""
    if (closed := _VALUE.match(text, start)) is not None:
        return closed[1], closed.end()
    unclosed = _UNCLOSED.match(text, start)
    assert unclosed is not None
    return unclosed[1].rstrip(), unclosed.end()


def write_glm(call: Call) -> str:
    """A call as the template of GLM-4.5 has it."""
    lines = [
        f"<arg_key>{key}</arg_key>\n<arg_value>{_text(value)}</arg_value>"
        for key, value in call.arguments.items()
    ]
    return "\n".join([f"{OPEN}{call.name}", *lines, CLOSE])


def _text(value: Any) -> str:
    return value if isinstance(value, str) else as_json(value)
