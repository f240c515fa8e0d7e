"""Calls whose arguments are JSON objects: those of Hermes, Llama 3, DeepSeek, Mistral and gpt-oss.
Qwen2.5 and Qwen3 write them between tags, Llama 3 alone, the others after tokens of their own."""

from __future__ import annotations

import re
from functools import partial
from itertools import takewhile
from typing import Any

from rollpacker.env.calls.call import (
    ARGUMENTS,
    BadCall,
    Call,
    Calls,
    Parsed,
    behind,
    between,
    call_of,
    json_at,
    json_call,
    skip,
)

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_PYTHON_TAG = "<|python_tag|>"
_TAG = re.compile(f"{OPEN}|{CLOSE}")
_BEGINS = re.compile(OPEN)
_LLAMA3 = re.compile(r'\{\s*"(?:name"\s*:|type"\s*:\s*"function")')
"""The beginning of JSON meant as a call, if it has arguments too. It may not be well-formed."""
_BETWEEN = re.compile(r"[\s;]*")
_FENCE = re.compile(r"```(?:json|tool_code)?\s*")  # Gemma 3 always writes JSON in a fence
_FENCE_END = re.compile(r"\s*```")


def hermes(text: str, start: int) -> Parsed:
    """Parse JSON between tags."""
    return between(text, start, _BEGINS, _tagged)


def _tagged(text: str, start: int) -> tuple[Calls, int]:
    # A call without a closing tag ends with its JSON.
    found = json_at(text, start)
    if isinstance(found, BadCall):
        return (found,), next_place(text, start)
    value, end = found
    if (closed := closed_at(text, end)) is None:
        return (behind(text, end),), next_place(text, end)
    return (json_call(value),), closed


def closed_at(text: str, end: int) -> int | None:
    """Return the place after a call that is closed, the last, or followed by another. None
    otherwise."""
    after = skip(text, end)
    if text.startswith(CLOSE, after):
        return after + len(CLOSE)
    return after if after == len(text) or text.startswith(OPEN, after) else None


def next_place(text: str, start: int) -> int:
    """Return the place after a call that was not understood."""
    tag = _TAG.search(text, start)
    if tag is None:
        return len(text)
    return tag.end() if tag[0] == CLOSE else tag.start()


def llama3(text: str, start: int) -> Parsed:
    """Parse JSON that is the whole reply, possibly in one fence."""
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
    # JSON without arguments is an answer, not a call.
    if not _LLAMA3.match(text, start):
        return False
    read = json_at(text, start)
    said = text if isinstance(read, BadCall) else read[0]
    return any(f'"{key}"' in said if said is text else key in said for key in ARGUMENTS)


def _objects(text: str, start: int) -> tuple[Calls, int]:
    calls: list[Call | BadCall] = []
    while not calls or text.startswith("{", start):
        read = json_at(text, start)
        if isinstance(read, BadCall):
            return (*calls, read), len(text)
        value, end = read
        calls.append(json_call(value))
        start = _BETWEEN.match(text, end).end()  # type: ignore[union-attr]
    return tuple(calls), start


# DeepSeek: V3 and R1 have JSON in a fence, V3.1 the JSON alone. V3.2 and later write tags, and
# have no chat template that says so.

_DS_ALL, _DS_ALL_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_DS_OPEN, _DS_CLOSE, _DS_SEPARATOR = (
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
)
_DS_BEGINS = re.compile(f"(?:{_DS_ALL}\\s*)?{_DS_OPEN}|{_DS_ALL}")
_DS_ENDS = re.compile(f"\\s*(?:{_DS_CLOSE}\\s*(?:{_DS_ALL_END})?|{_DS_ALL_END}|(?={_DS_OPEN})|\\Z)")
_DS_PLACES = re.compile(f"({_DS_CLOSE}\\s*(?:{_DS_ALL_END})?|{_DS_ALL_END})|{_DS_OPEN}")
_V3 = re.compile(f"\\s*\\w+\\s*{_DS_SEPARATOR}\\s*([^\\s<`{{]+)\\s*(?:```(?:json)?)?")
_V31 = re.compile(f"\\s*([^\\s<{{]+)\\s*{_DS_SEPARATOR}")
_DS_FENCE_END = re.compile(r"\s*```")


def deepseek_v3(text: str, start: int) -> Parsed:
    """Parse the kind of a call, its name, and JSON in a fence."""
    shape = f"{_DS_OPEN}function{_DS_SEPARATOR}NAME and a block of ```json"
    return between(text, start, _DS_BEGINS, partial(_deepseek_read, head=_V3, shape=shape))


def deepseek_v31(text: str, start: int) -> Parsed:
    """Parse the name of a call, and JSON."""
    shape = f"{_DS_OPEN}NAME{_DS_SEPARATOR}{{...}}"
    return between(text, start, _DS_BEGINS, partial(_deepseek_read, head=_V31, shape=shape))


def _deepseek_read(text: str, start: int, head: re.Pattern[str], shape: str) -> tuple[Calls, int]:
    found = head.match(text, start)
    if found is None:
        return (BadCall(f"the call must be {shape}"),), _deepseek_next(text, start)
    read = json_at(text, found.end(), found[1])
    if isinstance(read, BadCall):
        return (read,), _deepseek_next(text, start)
    value, end = read
    if head is _V3 and (fence := _DS_FENCE_END.match(text, end)) is not None:
        end = fence.end()
    closed = _DS_ENDS.match(text, end)
    if closed is None:
        return (behind(text, end, found[1]),), _deepseek_next(text, end)
    return (call_of(found[1], value),), closed.end()


def _deepseek_next(text: str, start: int) -> int:
    place = _DS_PLACES.search(text, start)
    if place is None:
        return len(text)
    return place.end() if place[1] else place.start()


# Mistral: older tokenizers (v3, v7) have a JSON list behind the token, later ones (v11, v13) a
# name, an id in some, and JSON of the arguments.

_MISTRAL_OPEN = "[TOOL_CALLS]"
_MISTRAL_BEGINS = re.compile(re.escape(_MISTRAL_OPEN))
_MISTRAL_NAME = re.compile(
    r"\s*([^\s\[\]{}\"]+)\s*+(?:\[CALL_ID\]\s*+([^\s\[\]{}]*)\s*+)?(?:\[ARGS\])?\s*(?=\{)"
)


def mistral(text: str, start: int) -> Parsed:
    """Parse a list of all calls."""
    return between(text, start, _MISTRAL_BEGINS, _mistral_list)


def _mistral_list(text: str, start: int) -> tuple[Calls, int]:
    found = json_at(text, start)
    if isinstance(found, BadCall):
        return (found,), _mistral_next(text, start)
    value, end = found
    calls = value if isinstance(value, list) else [value]
    if not calls:
        return (BadCall("the list of calls is empty"),), end
    return tuple(json_call(each, _mistral_key(each)) for each in calls), end


def _mistral_key(call: Any) -> str | None:
    key = call.get("id") if isinstance(call, dict) else None
    return key if isinstance(key, str) else None


def mistral_v11(text: str, start: int) -> Parsed:
    """Parse calls that each follow a token."""
    return between(text, start, _MISTRAL_BEGINS, _mistral_named)


def _mistral_named(text: str, start: int) -> tuple[Calls, int]:
    head = _MISTRAL_NAME.match(text, start)
    if head is None:
        return (BadCall(f"the call must be {_MISTRAL_OPEN}NAME[ARGS]{{...}}"),), _mistral_next(
            text, start
        )
    found = json_at(text, head.end(), head[1])
    if isinstance(found, BadCall):
        return (found,), _mistral_next(text, start)
    value, end = found
    return (call_of(head[1], value, head[2]),), end


def _mistral_next(text: str, start: int) -> int:
    # Only the next token shows where a call ends that was not understood.
    place = text.find(_MISTRAL_OPEN, start)
    return len(text) if place < 0 else place


# gpt-oss: several messages, each in a channel (OpenAI's harmony format). Channel ``analysis`` is
# reasoning; a message with a recipient is a call, which ends the reply.

_CHANNEL, _MESSAGE, _CALL = "<|channel|>", "<|message|>", "<|call|>"
_HARMONY_ENDS = re.compile(r"(<\|end\|>|<\|call\|>|<\|return\|>|<\|start\|>)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_ANALYSIS = re.compile(r"<\|channel\|>\s*analysis\b")
_NAMESPACE = "functions."


def harmony(text: str, start: int) -> Parsed:
    """Parse messages, of which the last may be a call."""
    if _MESSAGE not in text[start:]:
        return Parsed(text)
    said: list[str] = []
    calls: list[Call | BadCall] = []
    # Every other piece is a token that ends the piece before it.
    pieces = takewhile(
        lambda piece: piece not in (_CALL, "<|return|>"), _HARMONY_ENDS.split(text[start:])
    )
    for piece in list(pieces)[::2]:
        header, found, body = piece.partition(_MESSAGE)
        recipient = _RECIPIENT.search(header)
        if not found:
            role = header.strip() == "assistant"
            said += [] if _CHANNEL in header or role else [header]
        elif recipient is not None:
            calls = [_harmony_read(recipient[1].removeprefix(_NAMESPACE), body)]
            break
        elif _ANALYSIS.search(header):
            said.append(f"<think>\n{body.strip()}\n</think>\n\n")
        else:
            said.append(body)
    content = text[:start] + "".join(said)
    return Parsed(content.strip() if calls else content, tuple(calls))


def _harmony_read(name: str, body: str) -> Call | BadCall:
    if not body.strip():
        return call_of(name, None)
    found = json_at(body, 0, name)
    if isinstance(found, BadCall):
        return found
    value, end = found
    return call_of(name, value) if skip(body, end) == len(body) else behind(body, end, name)
