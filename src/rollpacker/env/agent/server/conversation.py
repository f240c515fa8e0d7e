"""What a program says, as messages for the chat template, and whether it goes on from what was.

Tokens that were sampled or put in stay as they are, so a conversation can only grow. What changes
nothing for the model is let through: clients leave out keys, write None for no text, number calls
as they like, strip white space, and drop the text beside a call or a reply's reasoning.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from rollpacker.chat import NotTextError, text_of
from rollpacker.env.agent.server.http import RefusedError
from rollpacker.env.base import Message

_ROLES = {"developer": "system"}
"""What chat templates call by another name."""
_KEPT = ("name", "tool_call_id")


def read(messages: Any) -> list[Message]:
    """A request's messages for the chat template: text in one piece, arguments decoded.

    Raises ``RefusedError`` where they are none, or hold more than text.
    """
    if not isinstance(messages, list) or not messages:
        raise _refused("'messages' must be a list of messages, and have one at least")
    read = [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
    if read[-1]["role"] == "assistant":
        raise _refused(
            "the last message is the assistant's: a reply of the model cannot be begun for it"
        )
    return read


def behind(known: Sequence[Message], said: Sequence[Message]) -> Sequence[Message]:
    """The messages of ``said`` that come behind ``known``, the conversation so far.

    Raises ``RefusedError`` where it is not its beginning, or nothing comes behind.
    """
    for index, (was, now) in enumerate(zip(known, said, strict=False)):
        if not same(was, now):
            raise _refused(
                f"messages[{index}] ({now['role']}) is not what it was: a conversation can only "
                "grow, since it is trained on as it was sampled; send all messages as they were, "
                "and new ones behind them"
            )
    if len(said) <= len(known):
        raise _refused(
            f"the conversation has {len(known)} messages, these are its first {len(said)}: it can "
            "neither be shortened nor branched, since it is trained on as it was sampled"
        )
    return said[len(known) :]


def named(new: Sequence[Message], known: Sequence[Message]) -> list[Message]:
    """With the names of the tools that answer, which OpenAI's API leaves to the calls' ids, and
    chat templates may want."""
    names = {
        call.get("id"): call["function"]["name"]
        for message in (*known, *new)
        for call in message.get("tool_calls") or ()
    }
    return [
        {"name": names[message["tool_call_id"]]} | message
        if message["role"] == "tool" and message.get("tool_call_id") in names
        else message
        for message in new
    ]


def same(was: Message, now: Message) -> bool:
    """Whether a message is what it was, or an assistant's with a part left out."""
    if was["role"] != now["role"]:
        return False
    text, calls = _text(now), _calls(now)
    if was["role"] != "assistant":
        return text == _text(was)
    said_all = text == _text(was) and calls == _calls(was)
    only_text = bool(text) and text == _text(was) and not calls
    only_calls = bool(calls) and calls == _calls(was) and not text
    return said_all or only_text or only_calls


def _text(message: Message) -> str:
    text = message.get("content") or ""
    if message["role"] == "assistant":
        text = text.rpartition("</think>")[2]
    return text.strip()


def _calls(message: Message) -> list[bytes]:
    """Independent of their order, ids, and how arguments are written."""
    return sorted(
        msgspec.json.encode([call["name"], _arguments(call["arguments"])], order="deterministic")
        for call in (call["function"] for call in message.get("tool_calls") or ())
    )


def _arguments(said: Any) -> Any:
    """Of a call, decoded where they are JSON."""
    if not isinstance(said, str):
        return said
    try:
        return msgspec.json.decode(said)
    except msgspec.DecodeError:
        return said


def _message(message: Any, where: str) -> Message:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise _refused(f"{where} has no role")
    role = message["role"]
    read: Message = {"role": _ROLES.get(role, role)}
    read["content"] = _content(message.get("content"), role, where)
    read |= {key: message[key] for key in _KEPT if isinstance(message.get(key), str)}
    calls = message.get("tool_calls")
    if calls:
        read["tool_calls"] = [_call(call, where) for call in _list(calls, f"{where}.tool_calls")]
    return read


def _call(call: Any, where: str) -> Message:
    said = call.get("function") if isinstance(call, dict) else None
    if not isinstance(said, dict) or not isinstance(said.get("name"), str):
        raise _refused(f"{where}.tool_calls has one that is no function's")
    read = {"name": said["name"], "arguments": _arguments(said.get("arguments") or {})}
    number = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return {**number, "type": "function", "function": read}


def _content(content: Any, role: str, where: str) -> str | None:
    """None where nobody but the assistant says nothing: that is the episode's failure."""
    try:
        text = text_of(content)
    except NotTextError:
        raise _refused(f"{where}.content has more than text: the model reads only text") from None
    if text is None:
        return "" if role == "assistant" else None
    if not isinstance(text, str):
        raise _refused(f"{where}.content is no list of parts, and no text")
    return text


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise _refused(f"{where} is no list")
    return value


def _refused(why: str) -> RefusedError:
    return RefusedError(400, why)
