"""One episode in the process of environments: the conversation, its tokens and its limits."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from rollpacker.config import EnvironmentConfig
from rollpacker.env.base import EpisodeError, Factory, Message, Opening, Turn
from rollpacker.env.calling import call
from rollpacker.env.messages import Answer, Begin, Step
from rollpacker.env.template import Template
from rollpacker.errors import told

_CLOSING_S = 5.0
_CHARACTERS = 64
"""Of a token at most, about: longer messages are not even encoded."""


class Episode:
    """Asks an environment, and answers the driver in tokens.

    Args:
        config: limits, and what counts as the reward.
        factory: makes the environment.
        template: between messages and tokens.
        begin: the driver's command.
    """

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
        self._closed = False

    async def begin(self) -> Answer:
        """Make the environment, and begin. Never raises."""
        return await self._guarded(self._begin)

    async def step(self, command: Step) -> Answer:
        """Take the model's reply. Never raises."""
        return await self._guarded(lambda: self._step(command))

    async def _guarded(self, work: Callable[[], Any]) -> Answer:
        """What goes wrong is this episode's own."""
        start = time.perf_counter()
        limit = self._config.step_timeout_s
        try:
            answer: Answer = await asyncio.wait_for(work(), limit)
        except TimeoutError:
            answer = self._failed(f"timed out after {limit:g} s (environment.step_timeout_s)")
        except EpisodeError as error:
            answer = self._failed(str(error))
        except Exception as error:  # whatever a user's environment raises
            answer = self._failed(told(error))
        if answer.over or answer.error:
            await self.close()
        return _timed(answer, time.perf_counter() - start)

    def _failed(self, error: str) -> Answer:
        return Answer(episode=self._command.episode, error=error, messages=self._messages)

    async def _begin(self) -> Answer:
        begin = self._command
        self._environment = await call(self._factory.make)
        opening = _opening(await call(self._environment.reset, begin.row))
        self._tools += opening.tools
        self._messages += opening.messages
        prompt = b""
        if opening.prompt is not None or opening.tools or opening.messages:
            first = begin.prompt if opening.prompt is None else opening.prompt
            prompt = self._prompt([*first, *opening.messages])
        return Answer(
            episode=begin.episode,
            prompt=prompt,
            over="stop" if opening.done else "",
            reward=opening.reward,
        )

    def _prompt(self, messages: Sequence[Message]) -> bytes:
        tokens = self._template.prompt(messages, self._tools)
        if len(tokens) > self._command.room:
            raise EpisodeError(
                f"reset leads to a prompt of {len(tokens)} tokens, and {self._command.room} leave "
                "room for a response: lower rollout.max_completion_length or "
                "environment.max_total_tokens"
            )
        return _packed(tokens)

    async def _step(self, command: Step) -> Answer:
        ids = np.frombuffer(command.reply, np.int32).tolist()
        reply = self._template.reply(ids)
        self._messages.append(reply.message)
        self._turns += 1
        if command.cut:
            return await self._last(Turn(), "length")
        turn = _turn(await call(self._environment.step, reply.message))
        if turn.done:
            return await self._last(turn, "stop")
        self._messages += turn.messages
        if self._turns >= self._config.max_turns or command.left_sampled <= 0:
            return await self._last(turn, "length")
        tokens = self._delta(ids, turn.messages, command.left)
        if tokens is None:
            return await self._last(turn, "length")
        return self._answer(turn, tokens=_packed(tokens))

    async def _last(self, turn: Turn, over: str) -> Answer:
        """The episode is over: what the environment makes of it as a whole counts too."""
        final = getattr(self._environment, "final_reward", None)
        if final is not None:
            turn = _with_reward(turn, await call(final))
        return self._answer(turn, over=over, messages=self._messages)

    def _answer(self, turn: Turn, **more: Any) -> Answer:
        return Answer(
            episode=self._command.episode,
            reward=turn.reward,
            calls=turn.calls,
            failed_calls=turn.failed_calls,
            metrics=dict(turn.metrics),
            **more,
        )

    def _delta(self, reply: list[int], messages: Sequence[Message], left: int) -> list[int] | None:
        """Tokens of what comes behind a reply; None where they leave no room for another."""
        characters = sum(len(str(message.get("content") or "")) for message in messages)
        if characters > _CHARACTERS * left:
            return None
        tokens = self._template.delta(reply, messages, self._tools)
        return tokens if len(tokens) < left else None

    async def close(self) -> None:
        """End the environment, whatever it is at. Never raises, and never waits long."""
        if self._closed or self._environment is None:
            return
        self._closed = True
        close = getattr(self._environment, "close", None)
        if close is not None:
            with contextlib.suppress(Exception):
                await asyncio.wait_for(call(close), _CLOSING_S)


def _opening(said: Any) -> Opening:
    if isinstance(said, Opening):
        opening = said
    elif said is None:
        opening = Opening()
    else:
        opening = Opening(messages=said)
    _check_messages(opening.messages, "reset")
    return opening


def _turn(said: Any) -> Turn:
    if not isinstance(said, Turn):
        raise EpisodeError(f"step returned {type(said).__name__}, not a Turn")
    if said.reward is not None and not isinstance(said.reward, int | float):
        raise EpisodeError(f"step gave a reward of {type(said.reward).__name__}, not a number")
    if not said.done and not said.messages:
        raise EpisodeError("step returned no messages, and is not done")
    _check_messages(said.messages, "step")
    return said


def _check_messages(messages: Any, where: str) -> None:
    if isinstance(messages, str | bytes | dict) or not isinstance(messages, Sequence):
        raise EpisodeError(f"{where} returned {type(messages).__name__}, not a list of messages")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise EpisodeError(f"{where} returned a message without a role: {message!r:.80}")


def _with_reward(turn: Turn, more: Any) -> Turn:
    if more is None:
        return turn
    return Turn(
        messages=turn.messages,
        reward=float(more) + (turn.reward or 0.0),
        done=turn.done,
        calls=turn.calls,
        failed_calls=turn.failed_calls,
        metrics=turn.metrics,
    )


def _timed(answer: Answer, seconds: float) -> Answer:
    return msgspec.structs.replace(answer, seconds=seconds)


def _packed(tokens: Sequence[int]) -> bytes:
    return np.asarray(tokens, np.int32).tobytes()
