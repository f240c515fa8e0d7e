"""A model's reply as a chat message, and what environments read in it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from rollpacker.env.base import Message
from rollpacker.env.calls.call import BadCall, Call, Parsed

_KEY = re.compile("[A-Za-z0-9]{9}")
"""Ids as Mistral's models write them, and their templates insist on."""


@dataclass(frozen=True, slots=True)
class ToolRequest:
    """A call that a reply made; ``key`` is its id, None where it has none."""

    call: Call | BadCall
    key: str | None = None


def to_message(parsed: Parsed, text: str, earlier: int = 0) -> Message:
    """The assistant's message, as OpenAI's API has it.

    Where it has calls, ``text`` is the whole of what was said. Those that were not understood are
    in ``bad_calls``, with their places among all calls of the reply. ``earlier``: calls of the
    conversation's earlier replies, so that no two have the same id; one that the model gave itself
    stays, for what the tool answers names it.
    """
    message: Message = {"role": "assistant", "content": parsed.content}
    if not parsed.calls:
        return message
    digest = blake2b(text.encode("utf-8", "replace"), digest_size=2).hexdigest()
    good, bad = [], []
    for place, call in enumerate(parsed.calls):
        # Nine letters and digits, which some templates insist on.
        key = f"{digest}{(earlier + place) % 100_000:05}"
        if isinstance(call, BadCall):
            named = {"name": whole(call.name)} if call.name else {}
            bad.append({"place": place, "error": call.error, "id": key, **named})
            continue
        own = call.key if call.key and _KEY.fullmatch(call.key) else key
        good.append(_openai(call, key if any(own == each["id"] for each in good) else own))
    found = {"tool_calls": good, "bad_calls": bad, "text": text}
    return message | {key: value for key, value in found.items() if value}


def _openai(call: Call, key: str) -> dict[str, Any]:
    function = {"name": whole(call.name), "arguments": json.dumps(call.arguments)}
    return {"id": key, "type": "function", "function": function}


def count_calls(message: Message) -> int:
    """Of a reply, those that were not understood among them."""
    return len(message.get("tool_calls") or ()) + len(message.get("bad_calls") or ())


def calls_of(message: Message) -> list[ToolRequest]:
    """The calls of a reply, in its order."""
    asked = [_asked(each) for each in message.get("tool_calls") or ()]
    for bad in message.get("bad_calls") or ():
        asked.insert(
            bad["place"], ToolRequest(BadCall(bad["error"], bad.get("name")), bad.get("id"))
        )
    return asked


def _asked(call: Mapping[str, Any]) -> ToolRequest:
    function = call["function"]
    return ToolRequest(Call(function["name"], arguments_of(function)), call.get("id"))


def arguments_of(function: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a message's call: an object, or JSON text of one."""
    arguments = function.get("arguments") or {}
    return json.loads(arguments) if isinstance(arguments, str) else arguments


def said(message: Message) -> str:
    """All that the model said, its calls included, as it wrote them."""
    return str(message.get("text") or message.get("content") or "")


def whole(text: str) -> str:
    """Text that can be written and tokenised: half a character becomes a question mark."""
    return text.encode("utf-8", "replace").decode()


def with_text(prompt: Sequence[Message], text: str) -> list[Message]:
    """A prompt with text behind its last message, which is the user's where it has one."""
    if not prompt or prompt[-1].get("role") != "user":
        return [*prompt, {"role": "user", "content": text}]
    last = prompt[-1]
    return [*prompt[:-1], {**last, "content": f"{last.get('content') or ''}{text}"}]
