"""One episode in the process of environments: the conversation, its tokens and its limits."""

from __future__ import annotations

import asyncio
import contextlib
import math
import operator
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from rollpacker.chat import NotTextError, text_of
from rollpacker.config import EnvironmentConfig
from rollpacker.env.base import EpisodeError, Factory, Message, Opening, Turn, call
from rollpacker.env.messages import Begin, EnvironmentAnswer, ModelReplied, count_calls
from rollpacker.env.template import Template
from rollpacker.errors import one_line, told

TIMED_OUT = "timed out after"  # the beginning of a timeout's error
_CLOSING_S = 5.0
_PATIENCE_S = 1.0
"""Seconds to wait for an environment to close. Then it closes in the background."""
_CHARACTERS = 64
"""About the most characters of a token. Longer messages are not even encoded."""


class Episode:
    """Asks an environment, and answers the driver in tokens."""

    def __init__(
        self, config: EnvironmentConfig, factory: Factory, template: Template, begin: Begin
    ) -> None:
        self._config = config
        self._template = template
        self._factory = factory
        self._command = begin
        self._environment: Any = None
        self._tools: list[Any] = list(begin.tools)
        self._messages: list[Message] = []
        self._turns = 0
        self._calls = 0
        self._answered = False
        self._closed = False
        self._closing: asyncio.Task[None] | None = None

    async def begin(self) -> EnvironmentAnswer:
        """Make the environment, and begin. Never raises."""
        return await self._guarded(self._begin)

    async def step(self, command: ModelReplied) -> EnvironmentAnswer:
        """Take the model's reply. Never raises."""
        return await self._guarded(lambda: self._step(command))

    async def _guarded(self, work: Callable[[], Any]) -> EnvironmentAnswer:
        start = time.perf_counter()
        limit = self._config.step_timeout_s
        scope = asyncio.timeout(limit)
        try:
            async with scope:
                answer: EnvironmentAnswer = await work()
        except BaseException as error:  # a user's environment may raise anything
            if _not_theirs(error):
                raise
            late = isinstance(error, TimeoutError) and scope.expired()
            own = f"{TIMED_OUT} {limit:g} s (environment.step_timeout_s)"
            answer = EnvironmentAnswer(
                episode=self._command.episode,
                error=own if late else told(error),
                messages=self._messages,
            )
        if answer.over or answer.error:
            await self.close()
        return msgspec.structs.replace(answer, seconds=time.perf_counter() - start)

    async def _begin(self) -> EnvironmentAnswer:
        begin = self._command
        self._template = self._template.variant(begin.template)
        making = asyncio.ensure_future(call(self._factory.make))
        making.add_done_callback(self._made)
        await asyncio.shield(making)
        opening = _opening(await call(self._environment.reset, pickle.loads(begin.row)))
        self._tools += opening.tools
        self._messages += opening.messages
        prompt = b""
        if opening.prompt is not None or opening.tools or opening.messages:
            first = begin.prompt if opening.prompt is None else opening.prompt
            prompt = self._prompt([*first, *opening.messages])
        return EnvironmentAnswer(
            episode=begin.episode,
            prompt=prompt,
            over="stop" if opening.done else "",
            reward=opening.reward,
        )

    def _made(self, making: asyncio.Future[Any]) -> None:
        # The episode may have been given up while the environment was made.
        if making.cancelled() or making.exception() is not None:
            return
        self._environment = making.result()
        if self._closed:
            self._closing = asyncio.create_task(_end(self._environment))

    def _prompt(self, messages: Sequence[Message]) -> bytes:
        room = self._command.room
        long = not _may_fit(messages, room)
        tokens = [] if long else self._template.prompt(messages, self._tools)
        if long or len(tokens) > room:
            count = f"more than {room}" if long else len(tokens)
            raise EpisodeError(
                f"reset leads to a prompt of {count} tokens, and {room} leave "
                "room for a response: lower rollout.max_completion_length or "
                "environment.max_total_tokens"
            )
        return _packed(tokens)

    async def _step(self, command: ModelReplied) -> EnvironmentAnswer:
        ids = np.frombuffer(command.reply, np.int32).tolist()
        reply = self._template.reply(ids, self._tools, self._calls, answered=self._answered)
        self._calls += count_calls(reply.message)
        self._messages.append(reply.message)
        self._turns += 1
        if command.cut:
            return await self._last(Turn(), "length")
        turn = _turn(await call(self._environment.step, reply.message))
        if turn.done:
            return await self._last(turn, "stop")
        if not _may_fit(turn.messages, command.left):
            return await self._last(turn, "length")
        self._messages += turn.messages
        if self._turns >= self._config.max_turns or command.left_sampled <= 0:
            return await self._last(turn, "length")
        tokens = self._template.delta(ids, turn.messages, self._tools)
        if len(tokens) >= command.left:  # no room for another reply
            return await self._last(turn, "length")
        self._answered = turn.messages[-1]["role"] == "tool"
        return self._answer(turn, tokens=_packed(tokens))

    async def _last(self, turn: Turn, over: str) -> EnvironmentAnswer:
        final = getattr(self._environment, "final_reward", None)
        if final is not None:
            turn = _with_reward(turn, await call(final))
        return self._answer(turn, over=over, messages=self._messages)

    def _answer(self, turn: Turn, **more: Any) -> EnvironmentAnswer:
        return EnvironmentAnswer(
            episode=self._command.episode,
            reward=turn.reward,
            calls=turn.calls,
            failed_calls=turn.failed_calls,
            metrics=dict(turn.metrics),
            **more,
        )

    async def close(self) -> None:
        """End the environment at any point. Never raises, and never waits long."""
        if self._closed:
            return
        self._closed = True
        if self._environment is not None:
            self._closing = asyncio.create_task(_end(self._environment))
            await asyncio.wait([self._closing], timeout=_PATIENCE_S)


async def _end(environment: Any) -> None:
    close = getattr(environment, "close", None)
    if close is not None:
        with contextlib.suppress(Exception):
            await asyncio.wait_for(call(close), _CLOSING_S)


def _not_theirs(error: BaseException) -> bool:
    # Whether the episode itself was stopped, so that the environment did not fail.
    task = asyncio.current_task()
    stopped = isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling()
    return bool(stopped) or isinstance(error, GeneratorExit)


def _may_fit(messages: Sequence[Message], tokens: int) -> bool:
    characters = sum(len(str(message.get("content") or "")) for message in messages)
    return characters <= _CHARACTERS * tokens


def _opening(said: Any) -> Opening:
    if isinstance(said, Opening):
        opening = said
    elif said is None:
        opening = Opening()
    else:
        opening = Opening(messages=said)
    prompt = opening.prompt
    return replace(
        opening,
        messages=_checked(opening.messages, "reset"),
        prompt=None if prompt is None else _checked(prompt, "reset"),
        reward=_reward(opening.reward, "reset"),
    )


def _turn(said: Any) -> Turn:
    if not isinstance(said, Turn):
        raise EpisodeError(f"step returned {type(said).__name__}, not a Turn")
    if not said.done and not said.messages:
        raise EpisodeError("step returned no messages, and is not done")
    return replace(
        said,
        messages=_checked(said.messages, "step"),
        reward=_reward(said.reward, "step"),
        calls=_count(said.calls, "calls"),
        failed_calls=_count(said.failed_calls, "failed_calls"),
        metrics=_metrics(said.metrics),
    )


def _reward(given: Any, where: str) -> float | None:
    if given is None:
        return None
    reward = _number(given, f"{where} gave a reward")
    if not math.isfinite(reward):
        raise EpisodeError(f"{where} gave a reward of {reward}")
    return reward


def _metrics(given: Any) -> dict[str, float]:
    if not isinstance(given, Mapping):
        raise EpisodeError(f"step gave metrics of {type(given).__name__}, not numbers by name")
    return {
        str(name): _number(value, f"step gave a metric {name!r:.80}")
        for name, value in given.items()
    }


def _number(given: Any, what: str) -> float:
    try:
        if hasattr(given, "__float__"):
            return float(given)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        pass
    raise EpisodeError(f"{what} of {type(given).__name__}, not a number")


def _count(given: Any, what: str) -> int:
    try:
        return operator.index(given)
    except TypeError:
        kind = type(given).__name__
        raise EpisodeError(f"step gave {what} of {kind}, not a whole number") from None


def _checked(messages: Any, where: str) -> list[Message]:
    # Check messages for templates and the driver, which reads nothing else.
    if isinstance(messages, str | bytes | dict) or not isinstance(messages, Sequence):
        raise EpisodeError(f"{where} returned {type(messages).__name__}, not a list of messages")
    return [_message(message, where) for message in messages]


def _message(message: Any, where: str) -> Message:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise EpisodeError(f"{where} returned a message without a role: {message!r:.80}")
    if odd := [key for key in message if not isinstance(key, str)]:
        raise EpisodeError(f"{where} returned a message with a key that is no text: {odd[0]!r}")
    message = _with_text(message, f"{where} returned a message of role '{message['role']:.40}'")
    try:
        msgspec.msgpack.encode(message)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        why = one_line(error)
        raise EpisodeError(f"{where} returned a message that cannot be passed on: {why}") from error
    return message


def _with_text(message: Message, where: str) -> Message:
    try:
        content = text_of(message.get("content"))
    except NotTextError as error:
        raise EpisodeError(f"{where}: {error}") from None
    if content is None and message.get("tool_calls"):
        return message
    if not isinstance(content, str):
        raise EpisodeError(f"{where} whose content is {type(content).__name__}, not text")
    return {**message, "content": content}


def _with_reward(turn: Turn, more: Any) -> Turn:
    if more is None:
        return turn
    gained = _reward(more, "final_reward")
    assert gained is not None
    return replace(turn, reward=gained + (turn.reward or 0.0))


def _packed(tokens: Sequence[int]) -> bytes:
    return np.asarray(tokens, np.int32).tobytes()
