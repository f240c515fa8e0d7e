"""A program's talk with the model: one request after the other, of one growing conversation."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollpacker.env.agent.server.conversation import behind, named, read, same
from rollpacker.env.agent.server.http import RefusedError
from rollpacker.env.agent.server.replies import shown
from rollpacker.env.base import Message


@dataclass(slots=True, kw_only=True, eq=False)
class ProgramRequest:
    """A request of the program.

    Args:
        conversation: all messages up to here.
        new: those behind what was there before.
        tools: JSON schemas of the tools that it gives.
        calling: whether it takes calls as such, not as text.
        reply: the model's, once there is one; or why there is none.
        heard: whether the reply got to the program, or may still do.
    """

    conversation: Sequence[Message]
    new: Sequence[Message]
    tools: Sequence[Mapping[str, Any]]
    calling: bool
    reply: asyncio.Future[Message | RefusedError]
    heard: bool = True


class Session:
    """Of one episode. Between the program's requests, and the environment that has them answered.

    Attributes:
        news: set when the program has asked; whoever waits clears it.
    """

    def __init__(self) -> None:
        self.news = asyncio.Event()
        self._said: list[Message] = []
        self._tools: Sequence[Mapping[str, Any]] = ()
        self._last: ProgramRequest | None = None
        self._unread: ProgramRequest | None = None
        self._closed = False

    @property
    def waiting(self) -> bool:
        """Whether the program waits for a reply."""
        return self._last is not None and not self._last.reply.done()

    @property
    def calling(self) -> bool:
        """Whether it takes calls."""
        return self._last is not None and self._last.calling

    def ask(self, body: Mapping[str, Any], *, again: bool = False) -> ProgramRequest:
        """Take a request; its ``reply`` comes later.

        One that the program sends again, since it lost the connection or patience, is the same one;
        ``again``: it says so itself. Raises ``RefusedError`` where it is none that can be served.
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
        """A request that was not taken yet."""
        asked, self._unread = self._unread, None
        return asked

    def answer(self, reply: Message) -> None:
        """Give the model's reply to the request that waits for it, if the program still does."""
        if self._last is None or not self.waiting:
            return
        message = shown(reply, calling=self.calling)
        self._said = [*self._last.conversation, message]
        self._last.reply.set_result(message)

    def close(self) -> None:
        """The episode is over: what waits is told so, and nothing more is taken."""
        self._closed = True
        if self._last is not None and self.waiting:
            self._last.reply.set_result(_over())

    def _tools_of(self, body: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        """A later request may leave them out, since the model has read them at the beginning."""
        tools = body.get("tools") or []
        if not isinstance(tools, list) or not all(_is_function(tool) for tool in tools):
            raise RefusedError(400, "'tools' must be a list of functions' JSON schemas")
        if self._last is not None and any(tool not in self._tools for tool in tools):
            raise RefusedError(
                400,
                "'tools' has one that the first request had not: the model read its tools at the "
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


def _is_function(tool: Any) -> bool:
    return isinstance(tool, dict) and isinstance(tool.get("function"), dict)


def _same_all(asked: ProgramRequest, now: Sequence[Message]) -> bool:
    return len(asked.conversation) == len(now) and all(map(same, asked.conversation, now))


def _over() -> RefusedError:
    return RefusedError(410, "the episode is over: the model gives no more replies", "episode_over")
