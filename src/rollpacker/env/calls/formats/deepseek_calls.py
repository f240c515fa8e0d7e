"""Calls as DeepSeek's models write them: names and JSON, between tokens of their own.

V3 and R1 have JSON in a fence, V3.1 the JSON alone. V3.2 and later write tags, and have no chat
template that says so.
"""

from __future__ import annotations

import re
from functools import partial

from rollpacker.env.calls.call import BadCall, Call, Parsed, call_of
from rollpacker.env.calls.formats.scan import Calls, as_json, behind, between, json_at

_ALL, _ALL_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_OPEN, _CLOSE, _SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
_BEGINS = re.compile(f"(?:{_ALL}\\s*)?{_OPEN}|{_ALL}")
_ENDS = re.compile(f"\\s*(?:{_CLOSE}\\s*(?:{_ALL_END})?|{_ALL_END}|(?={_OPEN})|\\Z)")
_PLACES = re.compile(f"({_CLOSE}\\s*(?:{_ALL_END})?|{_ALL_END})|{_OPEN}")
_V3 = re.compile(f"\\s*\\w+\\s*{_SEPARATOR}\\s*([^\\s<`{{]+)\\s*(?:```(?:json)?)?")
_V31 = re.compile(f"\\s*([^\\s<{{]+)\\s*{_SEPARATOR}")
_FENCE_END = re.compile(r"\s*```")


def deepseek_v3(text: str, start: int) -> Parsed:
    """The kind of a call, its name, and JSON in a fence."""
    shape = f"{_OPEN}function{_SEPARATOR}NAME and a block of ```json"
    return between(text, start, _BEGINS, partial(_read, head=_V3, shape=shape))


def deepseek_v31(text: str, start: int) -> Parsed:
    """The name of a call, and JSON."""
    shape = f"{_OPEN}NAME{_SEPARATOR}{{...}}"
    return between(text, start, _BEGINS, partial(_read, head=_V31, shape=shape))


def _read(text: str, start: int, head: re.Pattern[str], shape: str) -> tuple[Calls, int]:
    found = head.match(text, start)
    if found is None:
        return (BadCall(f"the call must be {shape}"),), _next(text, start)
    read = json_at(text, found.end(), found[1])
    if isinstance(read, BadCall):
        return (read,), _next(text, start)
    value, end = read
    if head is _V3 and (fence := _FENCE_END.match(text, end)) is not None:
        end = fence.end()
    closed = _ENDS.match(text, end)
    if closed is None:
        return (behind(text, end, found[1]),), _next(text, end)
    return (call_of(found[1], value),), closed.end()


def _next(text: str, start: int) -> int:
    """Where text goes on behind a call that was not understood."""
    place = _PLACES.search(text, start)
    if place is None:
        return len(text)
    return place.end() if place[1] else place.start()


def write_deepseek_v3(call: Call) -> str:
    """A call, and the end of all."""
    block = f"```json\n{as_json(call.arguments)}\n```"
    return f"{_ALL}{_OPEN}function{_SEPARATOR}{call.name}\n{block}{_CLOSE}{_ALL_END}"


def write_deepseek_v31(call: Call) -> str:
    """A call, and the end of all."""
    return f"{_ALL}{_OPEN}{call.name}{_SEPARATOR}{as_json(call.arguments)}{_CLOSE}{_ALL_END}"
