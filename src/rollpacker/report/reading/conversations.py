"""Conversations of a model and its environment, in a form for people to read. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollpacker.core.codec import dumps, loads

Row = Mapping[str, Any]
"""A response, with the columns ``sample_table.TURNS`` if its run has an environment."""


@dataclass(frozen=True, slots=True)
class ShownCall:
    """A tool's name and its arguments, as text."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message of a conversation.

    If calls in it could not be parsed, ``content`` is the whole reply, and ``errors`` are theirs.
    ``turn`` is the number, from 1, of the model's turn, and 0 for other messages. ``about`` has the
    turn's tokens and seconds.
    """

    role: str
    name: str = ""
    content: str = ""
    calls: tuple[ShownCall, ...] = ()
    errors: tuple[str, ...] = ()
    turn: int = 0
    about: str = ""

    def texts(self) -> list[str]:
        named = [text for call in self.calls for text in (call.name, call.arguments)]
        return [self.content, self.name, *named, *self.errors]


def parsed(text: str | None) -> list[dict[str, Any]] | None:
    """Return the column ``messages``. None if it is empty or not a list of messages."""
    if text is None:
        return None
    try:
        found = loads(text)
    except (ValueError, RecursionError):
        return None
    whole = isinstance(found, list) and all(isinstance(message, dict) for message in found)
    return found if whole and found else None


def conversation(row: Row) -> list[Message] | None:
    """Return the conversation after a response's prompt, or None if there is none."""
    messages = parsed(row.get("messages"))
    if messages is None:
        return None
    columns = (row.get(name) or () for name in ("turn_tokens", "added_tokens", "wait_s"))
    turns = list(zip(*columns, strict=True))
    replies = [place for place, said in enumerate(messages) if said.get("role") == "assistant"]
    # If the environment also wrote replies of the model, their turns are unknown.
    same = len(replies) == len(turns)
    known = dict(zip(replies, enumerate(turns, 1), strict=True)) if same else {}
    return [_message(said, *known.get(place, (0, None))) for place, said in enumerate(messages)]


def turns_of(row: Row) -> str:
    """``2 turns (12 + 30 tokens), 0.25 s waited, 1 call``, or empty without an environment."""
    tokens = row.get("turn_tokens")
    if tokens is None:
        return ""
    each = f" ({' + '.join(map(str, tokens))} tokens)" if len(tokens) > 1 else ""
    calls, failed = row.get("tool_calls") or 0, row.get("failed_calls") or 0
    parts = [f"{_counted(len(tokens), 'turn')}{each}", f"{sum(row['wait_s'] or ()):.2f} s waited"]
    if calls:
        parts.append(_counted(calls, "call") + (f", {failed} failed" if failed else ""))
    return ", ".join(parts)


def says(messages: str, wanted: str) -> bool:
    """Whether a text occurs in the messages that the column ``messages`` shows."""
    found = parsed(messages) or []
    return any(wanted in text for said in found for text in _message(said).texts())


def _message(
    said: Mapping[str, Any], turn: int = 0, numbers: tuple[int, int, float] | None = None
) -> Message:
    calls, bad = said.get("tool_calls"), said.get("bad_calls")
    content = said.get("text") if bad else said.get("content")
    return Message(
        role=_text(said.get("role")),
        name=_text(said.get("name")),
        content=_text(content),
        calls=tuple(map(_call, calls)) if isinstance(calls, list) else (),
        errors=tuple(map(_error, bad)) if isinstance(bad, list) else (),
        turn=turn,
        about="" if numbers is None else _about(*numbers),
    )


def _about(sampled: int, added: int, wait_s: float) -> str:
    answer = f" for {_counted(added, 'token')}" if added else ""
    return f"{_counted(sampled, 'token')}, waited {wait_s:.2f} s{answer}"


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _call(call: Any) -> ShownCall:
    function = call.get("function", call) if isinstance(call, dict) else {"arguments": call}
    if not isinstance(function, dict):
        function = {"arguments": function}
    return ShownCall(_text(function.get("name")), _text(function.get("arguments")))


def _error(bad: Any) -> str:
    return _text(bad.get("error") if isinstance(bad, dict) else bad)


def _text(value: Any) -> str:
    """Convert a value to text that UTF-8 can encode, and join the parts of a list of texts."""
    if value is None:
        return ""
    if isinstance(value, list):
        parts = [part.get("text") if isinstance(part, dict) else None for part in value]
        if all(isinstance(part, str) for part in parts):
            value = "".join(map(str, parts))
    text = value if isinstance(value, str) else dumps(value).decode()
    return text.encode("utf-8", "replace").decode()
