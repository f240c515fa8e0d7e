"""Replies as gpt-oss writes them: several messages, each in a channel (OpenAI's harmony format).

What is in ``analysis`` is reasoning, and shown as other models write it, in ``<think>``; a message
with a recipient is a call. A reply ends with its first call: what a model says behind it was not
answered.
"""

from __future__ import annotations

import re
from itertools import takewhile

from rollpacker.env.calls.call import BadCall, Call, Parsed, call_of
from rollpacker.env.calls.formats.scan import as_json, behind, json_at, skip

_CHANNEL, _MESSAGE, _CALL = "<|channel|>", "<|message|>", "<|call|>"
_ENDS = re.compile(r"(<\|end\|>|<\|call\|>|<\|return\|>|<\|start\|>)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_ANALYSIS = re.compile(r"<\|channel\|>\s*analysis\b")
_NAMESPACE = "functions."


def harmony(text: str, start: int) -> Parsed:
    """Messages, of which the last may be a call."""
    if _MESSAGE not in text[start:]:
        return Parsed(text)
    said: list[str] = []
    calls: list[Call | BadCall] = []
    # Every other piece is a token that ends the one before.
    pieces = takewhile(lambda piece: piece not in (_CALL, "<|return|>"), _ENDS.split(text[start:]))
    for piece in list(pieces)[::2]:
        header, found, body = piece.partition(_MESSAGE)
        recipient = _RECIPIENT.search(header)
        if not found:
            said += [] if _CHANNEL in header or not _between(header) else [header]
        elif recipient is not None:
            calls = [_read(recipient[1].removeprefix(_NAMESPACE), body)]
            break
        elif _ANALYSIS.search(header):
            said.append(f"<think>\n{body.strip()}\n</think>\n\n")
        else:
            said.append(body)
    content = text[:start] + "".join(said)
    return Parsed(content.strip() if calls else content, tuple(calls))


def _between(header: str) -> str:
    """Text of a piece without a message; the role that begins one is none."""
    return "" if header.strip() == "assistant" else header


def _read(name: str, body: str) -> Call | BadCall:
    if not body.strip():
        return call_of(name, None)
    found = json_at(body, 0, name)
    if isinstance(found, BadCall):
        return found
    value, end = found
    return call_of(name, value) if skip(body, end) == len(body) else behind(body, end, name)


def write_harmony(call: Call) -> str:
    """A call as the model writes it; the template has its recipient before the channel."""
    header = f"{_CHANNEL}commentary to={_NAMESPACE}{call.name} <|constrain|>json{_MESSAGE}"
    return f"{header}{as_json(call.arguments)}"


def write_reply(reasoning: str, content: str, call: Call | None) -> str:
    """A whole reply, as it is sampled behind the role of its first message."""
    parts = [f"{_CHANNEL}analysis{_MESSAGE}{reasoning}"] if reasoning else []
    if content:
        channel = "final" if call is None else "commentary"
        parts.append(f"{_CHANNEL}{channel}{_MESSAGE}{content}")
    if call is not None:
        parts.append(write_harmony(call))
    return "<|end|><|start|>assistant".join(parts)
