"""Calls as Qwen3-Coder, Qwen3.5 and later, and Nemotron 3 write them: a tag for each argument.

Arguments are plain text there, and what they are is in the tool's schema: see ``typed``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from typing import Any

from rollpacker.env.calls.call import BadCall, Call, Parsed
from rollpacker.env.calls.formats.json_calls import CLOSE, OPEN, closed_at, next_place
from rollpacker.env.calls.formats.scan import Calls, as_json, between
from rollpacker.env.calls.formats.typed import Tools, schemas_of, typed

_BEGINS = re.compile(f"{OPEN}|(?=<function=)")
"""Some models leave the outer tag out."""

_FUNCTION = re.compile(r"\s*<function=([^<>\n]*)>")
_PARAMETER = re.compile(r"\s*<parameter=([^<>\n]*)>\n?")
_VALUE = re.compile(r"((?:(?!<parameter=).)*?)\n?</parameter>", re.DOTALL)
_UNCLOSED = re.compile(r"(.*?)\n?(?=<parameter=|</function>|</tool_call>|\Z)", re.DOTALL)
_END = re.compile(r"\s*</function>")


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


def qwen3_coder(text: str, start: int, tools: Tools) -> Parsed:
    """Tags in tags."""
    return between(text, start, _BEGINS, partial(_outer, tools=tools))


def _outer(text: str, start: int, tools: Tools) -> tuple[Calls, int]:
    outer = text.endswith(OPEN, 0, start)
    try:
        found = _read(text, start, tools)
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


def _read(text: str, start: int, tools: Tools) -> Written:
    """The call at ``start``. Raises ``NoCallError``.

    Models forget ends: a value also ends where the next one begins, or the call does.
    """
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
        value = _VALUE.match(text, parameter.end()) or _UNCLOSED.match(text, parameter.end())
        assert value is not None
        key = parameter[1].strip()
        arguments[key] = typed(value[1], schemas.get(key))
        place = value.end()
    end = _END.match(text, place)
    return Written(name, arguments, place if end is None else end.end(), end is not None)


def write_xml(call: Call) -> str:
    """A call as the templates have it."""
    lines = [
        f"<parameter={key}>\n{_text(value)}\n</parameter>" for key, value in call.arguments.items()
    ]
    return "\n".join([OPEN, f"<function={call.name}>", *lines, "</function>", CLOSE])


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return as_json(value) if isinstance(value, list | dict) else str(value)
