"""A call of a tool, and what a reply is made of."""

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
    """One call.

    Args:
        name: of the tool; one that does not exist is found out by whoever runs it.
        arguments: by name.
        key: the id that the model gave it, None where its format has none.
    """

    name: str
    arguments: dict[str, Any]
    key: str | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class BadCall:
    """What was meant as a call and is none."""

    error: str
    name: str | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Parsed:
    """A reply."""

    content: str
    calls: tuple[Call | BadCall, ...] = ()


def call_of(name: str, arguments: Any, key: str | None = None) -> Call | BadCall:
    """A call with what was written as its arguments."""
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        return BadCall(f"the arguments of {short(name)} must be a JSON object", name)
    if too_deep(arguments):
        return BadCall(deep(name), name)
    return Call(name, arguments, key)


def deep(name: str) -> str:
    """What is wrong with arguments that nobody means to be nested like that."""
    return f"the arguments of {short(name)} are nested too deep"


def short(text: str) -> str:
    """A name of the model's own, fit to be shown: it may be long, or half a character."""
    whole = text.encode("utf-8", "replace").decode()
    return repr(whole if len(whole) <= _LONGEST else whole[:_LONGEST] + "...")


# Shared by the formats: calls between other text, JSON at a place of it.

Calls = tuple[Call | BadCall, ...]
Reader = Callable[[str, int], tuple[Calls, int]]
"""The calls that begin at a place of a text, and where they end; none where it is text after
all."""

ARGUMENTS = ("arguments", "parameters")
"""Names of a call's arguments in JSON."""
_SPACE = re.compile(r"\s*")
_PASSED = 4096
"""Characters that may lie behind: an error of JSON counts the lines of all of them."""
_decode = json.JSONDecoder().raw_decode


def between(text: str, start: int, begins: re.Pattern[str], reader: Reader) -> Parsed:
    """A reply whose calls begin, behind ``start``, where a pattern does."""
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
    """Where white space ends."""
    return _SPACE.match(text, start).end()  # type: ignore[union-attr]


def json_at(text: str, start: int, name: str | None = None) -> tuple[Any, int] | BadCall:
    """A JSON value, and where it ends; ``name``: of the tool that it is for."""
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
    """What is wrong with that which stands behind the JSON of a call."""
    start = skip(text, end)
    if text.startswith("{", start):
        return BadCall("there is more than one JSON object in the call", name)
    if text.startswith("}", start):
        return BadCall("there is one } too many behind the JSON object of the call", name)
    return BadCall("there is text behind the JSON object of the call", name)


def json_call(value: Any, key: str | None = None) -> Call | BadCall:
    """The call that an object of a name and arguments is."""
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
    """As templates write it."""
    return json.dumps(value, ensure_ascii=False)
