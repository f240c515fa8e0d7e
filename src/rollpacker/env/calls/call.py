"""A call of a tool, and what a reply is made of."""

from __future__ import annotations

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
    """What was meant as a call and is none.

    Args:
        error: one line for the model.
        name: of the tool, where that much was understood.
    """

    error: str
    name: str | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Parsed:
    """A reply.

    Args:
        content: the text without its calls.
        calls: in the order of the text.
    """

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
