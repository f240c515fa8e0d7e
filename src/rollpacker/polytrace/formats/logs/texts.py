"""Texts of a log: who said them, about how many tokens they have, and ids of prompts."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any, cast

from rollpacker.polytrace.formats.files.lines import Record

CHARACTERS_PER_TOKEN = 4
"""Rule of thumb for English; code and mathematics have fewer, other scripts far fewer."""

REASONING = "reasoning_content"
"""What the model thought, beside what it said, in messages and in columns."""
_SAMPLED = ("assistant", "model", "gpt")
"""Roles of what the model said."""
_TOOL = re.compile(r"<tool_response>.*?(?:</tool_response>|\Z)", re.DOTALL)
"""What Qwen's templates put around a tool's answer, in logs of the whole conversation as a text,
which may end within it."""


def estimate(text: str) -> int:
    """About how many tokens ``text`` has; 0 only for an empty one."""
    return -(-len(text) // CHARACTERS_PER_TOKEN)


def prompt_id(text: str) -> str:
    """The same text has the same id in every step and file."""
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).hexdigest()


def identity(value: object) -> str:
    """A text that is the same for the same prompt: all that is told of it, images too."""
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)


def said(value: object) -> str:
    """The text of a prompt or completion: plain, or chat messages with ``content``."""
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        message = cast(Record, value)
        return said(message.get("content") or message.get("text") or "")
    if isinstance(value, list):
        return "".join(said(part) for part in cast(list[Any], value))
    return ""


def sampled(value: object) -> str:
    """Of a completion what the model itself said, its calls of tools included: neither what tools
    answered nor what others said in between."""
    if isinstance(value, str):
        return _TOOL.sub("", value) if "<tool_response>" in value else value
    if isinstance(value, dict):
        message = cast(Record, value)
        if message.get("role") not in (None, *_SAMPLED):
            return ""
        parts = (message.get(REASONING), message.get("content"))
        return "".join(sampled(said(part)) for part in parts) + _called(message.get("tool_calls"))
    if isinstance(value, list):
        return "".join(sampled(part) for part in cast(list[Any], value))
    return ""


def _called(calls: object) -> str:
    """Names and arguments; their markup is the template's, about which a log says nothing."""
    found: list[str] = []
    for call in cast(list[Any], calls) if isinstance(calls, list) else []:
        given = cast(Record, call if isinstance(call, dict) else {})
        inner: object = given.get("function", given)
        if isinstance(inner, dict):
            told = cast(Record, inner)
            arguments = told.get("arguments") or ""
            found += [
                said(told.get("name")),
                arguments if isinstance(arguments, str) else json.dumps(arguments),
            ]
    return "".join(found)


def with_reasoning(completion: object, reasoning: object) -> object:
    """A text with the reasoning that a log has in a column of its own, as a message has it; one
    that holds it already as it is."""
    if not isinstance(completion, str) or not isinstance(reasoning, str):
        return completion
    if not reasoning or reasoning in completion:
        return completion
    return {"role": "assistant", REASONING: reasoning, "content": completion}


def sides(conversation: object) -> tuple[object, object]:
    """Prompt and completion of a conversation: messages from the first of the model's on, or of
    texts that take turns each second one."""
    if not isinstance(conversation, list):
        return conversation, []
    parts = cast(list[Any], conversation)
    if all(isinstance(part, str) for part in parts):
        return parts[:1], parts[1::2]
    roles = [cast(Record, part).get("role") if isinstance(part, dict) else None for part in parts]
    first = next((at for at, role in enumerate(roles) if role in _SAMPLED), len(parts))
    return parts[:first], parts[first:]
