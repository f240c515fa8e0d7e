"""A call of a tool, and the parts of a reply."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rollpacker.env.calls.values import too_deep

_LONGEST = 100


@dataclass(frozen=True, slots=True)
class Call:
    """One call. ``name``: of the tool, which may not exist. ``arguments``: by name. ``key``: the id
    from the model, None if its format has none."""

    name: str
    arguments: dict[str, Any]
    key: str | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class BadCall:
    """Text that was meant as a call and is none."""

    error: str
    name: str | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Parsed:
    """A reply."""

    content: str
    calls: tuple[Call | BadCall, ...] = ()


def call_of(name: str, arguments: Any, key: str | None = None) -> Call | BadCall:
    """Return a call with the written arguments."""
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        return BadCall(f"the arguments of {short(name)} must be a JSON object", name)
    if too_deep(arguments):
        return BadCall(deep(name), name)
    return Call(name, arguments, key)


def deep(name: str) -> str:
    """Return the error for arguments nested too deep."""
    return f"the arguments of {short(name)} are nested too deep"


def short(text: str) -> str:
    """Return a name from the model, fit to be shown: it may be long, or have half a character."""
    whole = text.encode("utf-8", "replace").decode()
    return repr(whole if len(whole) <= _LONGEST else whole[:_LONGEST] + "...")


# Shared by the formats: calls between other text, JSON at a place of it.

Calls = tuple[Call | BadCall, ...]
Reader = Callable[[str, int], tuple[Calls, int]]
"""Returns the calls that begin at a place of a text, and their end. No calls if it is plain
text."""

ARGUMENTS = ("arguments", "parameters")  # names of a call's arguments in JSON
_SPACE = re.compile(r"\s*")
_PASSED = 4096
"""Characters before the current place that may stay: an error of JSON counts all their lines."""
_decode = json.JSONDecoder().raw_decode


def between(text: str, start: int, begins: re.Pattern[str], reader: Reader) -> Parsed:
    """Return a reply whose calls begin, after ``start``, at matches of a pattern."""
    calls: list[Call | BadCall] = []
    whole, rest = text, [text[:start]]
    while (opening := begins.search(text, start)) is not None:
        found, end = reader(text, opening.end())
        rest.append(text[start : opening.start() if found else end])
        start = end
        calls += found
        if start > _PASSED:
            text, start = text[start:], 0
    if not calls:
        return Parsed(whole)
    rest.append(text[start:])
    return Parsed("".join(rest).strip(), tuple(calls))


def skip(text: str, start: int) -> int:
    """Return the end of white space."""
    return _SPACE.match(text, start).end()  # type: ignore[union-attr]


def json_at(text: str, start: int, name: str | None = None) -> tuple[Any, int] | BadCall:
    """Return a JSON value and its end. ``name``: of its tool."""
    start = skip(text, start)
    try:
        return _decode(text, start)
    except json.JSONDecodeError as error:
        where = f"at character {error.pos - start}"
        return BadCall(f"the call is no valid JSON: {error.msg} {where}", name)
    except (ValueError, RecursionError):
        why = "a number is too long, or it is nested too deep"
        return BadCall(f"the call is no valid JSON: {why}", name)


def behind(text: str, end: int, name: str | None = None) -> BadCall:
    """Return the error for text after the JSON of a call."""
    start = skip(text, end)
    if text.startswith("{", start):
        return BadCall("there is more than one JSON object in the call", name)
    if text.startswith("}", start):
        return BadCall("there is one } too many behind the JSON object of the call", name)
    return BadCall("there is text behind the JSON object of the call", name)


def json_call(value: Any, key: str | None = None) -> Call | BadCall:
    """Return the call of an object with a name and arguments."""
    if not isinstance(value, dict):
        return BadCall(f"the call must be a JSON object with a name, not {_kind(value)}")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        return BadCall('the call has no "name"')
    arguments = next((value[key] for key in ARGUMENTS if key in value), None)
    if isinstance(arguments, str):  # some models write the object as text
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return BadCall(f"the arguments of {short(name)} must be a JSON object, not text", name)
        except RecursionError:
            return BadCall(deep(name), name)
    return call_of(name, arguments, key)


def _kind(value: Any) -> str:
    kinds = {list: "a list", str: "text", bool: "a truth value", type(None): "null"}
    return kinds.get(type(value), "a number")


def as_json(value: Any) -> str:
    """Return JSON in the notation of chat templates."""
    return json.dumps(value, ensure_ascii=False)
