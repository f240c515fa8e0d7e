"""A program's conversation with the model: one request after the other, and it only grows."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from rollpacker.chat import NotTextError, text_of
from rollpacker.env.agent.server.http import RefusedError, shown
from rollpacker.env.base import Message

# A program's messages, compared with the conversation so far. Tokens stay as they were sampled, so
# a conversation can only grow. Clients leave out keys, write None for no text, number calls anew,
# strip white space, and drop the text beside a call or a reply's reasoning. None of that matters
# to the model, so it is accepted.

_ROLES = {"developer": "system"}  # roles that chat templates call by another name
_KEPT = ("name", "tool_call_id")


def read(messages: Any) -> list[Message]:
    """Return a request's messages for the chat template: text in one piece, arguments decoded.
    Raises ``RefusedError`` if they are none, or hold more than text."""
    if not isinstance(messages, list) or not messages:
        raise _refused("'messages' must be a list of messages, and have one at least")
    read = [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
    if read[-1]["role"] == "assistant":
        raise _refused("the last message is the assistant's: the model cannot continue a reply")
    return read


def behind(known: Sequence[Message], said: Sequence[Message]) -> Sequence[Message]:
    """Return the messages of ``said`` after ``known``, the conversation so far. Raises
    ``RefusedError`` if ``known`` is not its beginning, or if no messages follow."""
    for index, (was, now) in enumerate(zip(known, said, strict=False)):
        if not same(was, now):
            raise _refused(
                f"messages[{index}] ({now['role']}) was changed: a conversation can only grow, "
                "since it is trained on as it was sampled. Send all messages unchanged, and new "
                "ones after them"
            )
    if len(said) <= len(known):
        raise _refused(
            f"the conversation has {len(known)} messages, these are its first {len(said)}: it can "
            "neither be shortened nor branched, since it is trained on as it was sampled"
        )
    return said[len(known) :]


def named(new: Sequence[Message], known: Sequence[Message]) -> list[Message]:
    """Add the names of the tools that answer. OpenAI's API has only the calls' ids, and chat
    templates may want names."""
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
    """Return whether a message is unchanged, or the assistant's with a part left out."""
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
    # Independent of order, ids, and the notation of arguments.
    return sorted(
        msgspec.json.encode([call["name"], _arguments(call["arguments"])], order="deterministic")
        for call in (call["function"] for call in message.get("tool_calls") or ())
    )


def _arguments(said: Any) -> Any:
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
        raise _refused(f"{where}.tool_calls has a call of no function")
    read = {"name": said["name"], "arguments": _arguments(said.get("arguments") or {})}
    number = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return {**number, "type": "function", "function": read}


def _content(content: Any, role: str, where: str) -> str | None:
    # None fails the episode: only the assistant may have no text.
    try:
        text = text_of(content)
    except NotTextError:
        raise _refused(f"{where}.content has more than text: the model reads only text") from None
    if text is None:
        return "" if role == "assistant" else None
    if not isinstance(text, str):
        raise _refused(f"{where}.content is neither text nor a list of parts")
    return text


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise _refused(f"{where} is no list")
    return value


def _refused(why: str) -> RefusedError:
    return RefusedError(400, why)


@dataclass(slots=True, kw_only=True, eq=False)
class ProgramRequest:
    """A request of the program.

    Args:
        conversation: all messages up to here.
        new: those that are new in this request.
        calling: whether it takes calls as such, not as text.
        reply: the model's reply, or why there is none.
        heard: whether the reply reached the program, or may still do.
    """

    conversation: Sequence[Message]
    new: Sequence[Message]
    tools: Sequence[Mapping[str, Any]]
    calling: bool
    reply: asyncio.Future[Message | RefusedError]
    heard: bool = True


class Session:
    """One episode, between the program's requests and the environment that gets them answered.
    ``news`` is set by a request, and cleared by the waiting side."""

    def __init__(self) -> None:
        self.news = asyncio.Event()
        self._said: list[Message] = []
        self._tools: Sequence[Mapping[str, Any]] = ()
        self._last: ProgramRequest | None = None
        self._unread: ProgramRequest | None = None
        self._closed = False

    @property
    def waiting(self) -> bool:
        return self._last is not None and not self._last.reply.done()

    @property
    def calling(self) -> bool:
        return self._last is not None and self._last.calling

    def ask(self, body: Mapping[str, Any], *, again: bool = False) -> ProgramRequest:
        """Take a request. Its ``reply`` comes later. Raises ``RefusedError`` if it cannot be
        served.

        A request that the program repeats after a lost connection or a timeout is the same request.
        ``again``: the program marked it as a repeat.
        """
        if self._closed:
            raise _over()
        _check_kind(body)
        messages, tools = read(body.get("messages")), self._tools_of(body)
        last = self._last
        if last is not None and (again or not last.heard) and _same_all(last, messages):
            last.heard = True
            return last
        if self.waiting:
            raise RefusedError(
                400,
                "another request waits for its reply: an episode is one conversation, so ask for "
                "one reply at a time",
            )
        new = named(behind(self._said, messages), self._said)
        reply = asyncio.get_running_loop().create_future()
        asked = ProgramRequest(
            conversation=[*self._said, *new],
            new=new,
            tools=tools,
            calling=bool(tools) and body.get("tool_choice") != "none",
            reply=reply,
        )
        if last is None:
            self._tools = tools
        self._last = self._unread = asked
        self.news.set()
        return asked

    def take(self) -> ProgramRequest | None:
        asked, self._unread = self._unread, None
        return asked

    def answer(self, reply: Message) -> None:
        """Give the model's reply to the waiting request, if there is one."""
        if self._last is None or not self.waiting:
            return
        message = shown(reply, calling=self.calling)
        self._said = [*self._last.conversation, message]
        self._last.reply.set_result(message)

    def close(self) -> None:
        """End the episode: a waiting request and all later ones are refused."""
        self._closed = True
        if self._last is not None and self.waiting:
            self._last.reply.set_result(_over())

    def _tools_of(self, body: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        # A later request may leave tools out, since the model read them at the beginning.
        tools = body.get("tools") or []
        if not isinstance(tools, list) or not all(
            isinstance(tool, dict) and isinstance(tool.get("function"), dict) for tool in tools
        ):
            raise RefusedError(400, "'tools' must be a list of functions' JSON schemas")
        if self._last is not None and any(tool not in self._tools for tool in tools):
            raise RefusedError(
                400,
                "'tools' has one that the first request lacked: the model read its tools at the "
                "beginning of the conversation, so give all of them there",
            )
        return tools


def _check_kind(body: Mapping[str, Any]) -> None:
    count = body.get("n")
    if count not in (None, 1):
        raise RefusedError(
            400, f"n={count!r:.20}: an episode is one conversation, so there is one reply at a time"
        )
    if body.get("functions"):
        raise RefusedError(400, "'functions' is not served any more: give them as 'tools'")


def _same_all(asked: ProgramRequest, now: Sequence[Message]) -> bool:
    return len(asked.conversation) == len(now) and all(map(same, asked.conversation, now))


def _over() -> RefusedError:
    return RefusedError(410, "the episode is over: the model gives no more replies", "episode_over")
