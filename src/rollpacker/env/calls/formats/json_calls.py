"""Calls that are JSON objects: between tags, as Qwen2.5 and Qwen3 write them, or alone, as Llama 3
does."""

from __future__ import annotations

import re

from rollpacker.env.calls.call import BadCall, Call, Parsed
from rollpacker.env.calls.formats.scan import (
    ARGUMENTS,
    Calls,
    as_json,
    behind,
    between,
    json_at,
    json_call,
    skip,
)

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_PYTHON_TAG = "<|python_tag|>"
_TAG = re.compile(f"{OPEN}|{CLOSE}")
_BEGINS = re.compile(OPEN)
_LLAMA3 = re.compile(r'\{\s*"(?:name"\s*:|type"\s*:\s*"function")')
"""How JSON begins that is meant as a call, if it has arguments too; it may not be well-formed."""
_BETWEEN = re.compile(r"[\s;]*")
_FENCE = re.compile(r"```(?:json|tool_code)?\s*")
"""Gemma 3 writes JSON in one, whatever it is told."""
_FENCE_END = re.compile(r"\s*```")


def hermes(text: str, start: int) -> Parsed:
    """JSON between tags."""
    return between(text, start, _BEGINS, _tagged)


def _tagged(text: str, start: int) -> tuple[Calls, int]:
    """The call behind a tag; one that is not closed ends with its JSON."""
    found = json_at(text, start)
    if isinstance(found, BadCall):
        return (found,), next_place(text, start)
    value, end = found
    if (closed := closed_at(text, end)) is None:
        return (behind(text, end),), next_place(text, end)
    return (json_call(value),), closed


def closed_at(text: str, end: int) -> int | None:
    """Where text goes on behind a call that is closed, the last, or followed by another; None
    where something else follows."""
    after = skip(text, end)
    if text.startswith(CLOSE, after):
        return after + len(CLOSE)
    return after if after == len(text) or text.startswith(OPEN, after) else None


def next_place(text: str, start: int) -> int:
    """Where text goes on behind a call that was not understood."""
    tag = _TAG.search(text, start)
    if tag is None:
        return len(text)
    return tag.end() if tag[0] == CLOSE else tag.start()


def llama3(text: str, start: int) -> Parsed:
    """JSON that is all of the reply, or all of it in one fence."""
    begin = skip(text, start)
    fence = _FENCE.match(text, begin)
    begin = begin if fence is None else fence.end()
    tagged = text.startswith(_PYTHON_TAG, begin)
    begin += len(_PYTHON_TAG) if tagged else 0
    if not tagged and not _meant(text, begin):
        return Parsed(text)
    calls, end = _objects(text, begin)
    if fence is not None and (closed := _FENCE_END.match(text, end)) is not None:
        end = closed.end()
    return Parsed(text[:start] + text[end:].strip(), calls)


def _meant(text: str, start: int) -> bool:
    """Whether JSON alone is a call, and no answer in JSON."""
    if not _LLAMA3.match(text, start):
        return False
    read = json_at(text, start)
    said = text if isinstance(read, BadCall) else read[0]
    return any(f'"{key}"' in said if said is text else key in said for key in ARGUMENTS)


def _objects(text: str, start: int) -> tuple[Calls, int]:
    """JSON objects one behind the other, and where text goes on; the first that is none ends
    them."""
    calls: list[Call | BadCall] = []
    while not calls or text.startswith("{", start):
        read = json_at(text, start)
        if isinstance(read, BadCall):
            return (*calls, read), len(text)
        value, end = read
        calls.append(json_call(value))
        start = _BETWEEN.match(text, end).end()  # type: ignore[union-attr]
    return tuple(calls), start


def write_hermes(call: Call) -> str:
    """A call between tags."""
    name, arguments = as_json(call.name), as_json(call.arguments)
    return f'{OPEN}\n{{"name": {name}, "arguments": {arguments}}}\n{CLOSE}'


def write_llama3(call: Call) -> str:
    """A call alone."""
    return f'{{"name": {as_json(call.name)}, "parameters": {as_json(call.arguments)}}}'
