"""Calls as Mistral's models write them, behind a token of their own.

Older tokenizers (v3, v7) have a JSON list behind it, later ones (v11, v13) a name, an id in some,
and JSON of the arguments.
"""

from __future__ import annotations

import re
from typing import Any

from rollpacker.env.calls.call import BadCall, Call, Parsed, call_of
from rollpacker.env.calls.formats.scan import Calls, as_json, between, json_at, json_call

_OPEN = "[TOOL_CALLS]"
_BEGINS = re.compile(re.escape(_OPEN))
_NAME = re.compile(
    r"\s*([^\s\[\]{}\"]+)\s*+(?:\[CALL_ID\]\s*+([^\s\[\]{}]*)\s*+)?(?:\[ARGS\])?\s*(?=\{)"
)


def mistral(text: str, start: int) -> Parsed:
    """A list of all calls."""
    return between(text, start, _BEGINS, _list)


def _list(text: str, start: int) -> tuple[Calls, int]:
    found = json_at(text, start)
    if isinstance(found, BadCall):
        return (found,), _next(text, start)
    value, end = found
    calls = value if isinstance(value, list) else [value]
    if not calls:
        return (BadCall("the list of calls is empty"),), end
    return tuple(json_call(each, _key(each)) for each in calls), end


def _key(call: Any) -> str | None:
    key = call.get("id") if isinstance(call, dict) else None
    return key if isinstance(key, str) else None


def mistral_v11(text: str, start: int) -> Parsed:
    """Each call behind a token of its own."""
    return between(text, start, _BEGINS, _named)


def _named(text: str, start: int) -> tuple[Calls, int]:
    head = _NAME.match(text, start)
    if head is None:
        return (BadCall(f"the call must be {_OPEN}NAME[ARGS]{{...}}"),), _next(text, start)
    found = json_at(text, head.end(), head[1])
    if isinstance(found, BadCall):
        return (found,), _next(text, start)
    value, end = found
    return (call_of(head[1], value, head[2]),), end


def _next(text: str, start: int) -> int:
    """Nothing says where a call ends that was not understood, but the next one."""
    place = text.find(_OPEN, start)
    return len(text) if place < 0 else place


def write_mistral(call: Call) -> str:
    """A list of one call."""
    return f'{_OPEN} [{{"name": {as_json(call.name)}, "arguments": {as_json(call.arguments)}}}]'


def write_mistral_v11(call: Call) -> str:
    """A call as Ministral 3 and Devstral 2 write it."""
    return f"{_OPEN}{call.name}[ARGS]{as_json(call.arguments)}"
