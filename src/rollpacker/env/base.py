"""The environment protocol, and the parts of an episode."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from rollpacker.chat import Message
from rollpacker.errors import PlainError, told, way
from rollpacker.policy.grading import PROMPTS, RewardFaults

# A raising call may be the model's fault, so a tool gets the patience of a reward that has answered
# before, and any answer clears it. A result without a JSON form is the tool's fault.

KEY = "environment.path"


@dataclass(slots=True)
class ToolRecord:
    """The failures of one tool."""

    raising: RewardFaults = field(default_factory=lambda: RewardFaults(1, patient=[0]))
    returning: RewardFaults = field(default_factory=lambda: RewardFaults(1))
    prompts: set[str] = field(default_factory=set[str])
    """Prompts of calls that raised since the last answer."""


class ToolFaults:
    """Counts the failed calls of a process's tools."""

    def __init__(self) -> None:
        self.records: dict[str, ToolRecord] = {}
        self._episodes = 0
        self._told: set[str] = set()
        self._said: list[str] = []
        self.broken: str | None = None  # why the run cannot go on

    def said(self) -> list[str]:
        """Return the new lines for the user."""
        said, self._said = self._said, []
        return said

    def caller(self, row: Mapping[str, Any]) -> Caller:
        self._episodes += 1
        return Caller(self, self._episodes, row)

    def record(self, tool: str) -> ToolRecord:
        return self.records.setdefault(tool, ToolRecord())

    def say(self, line: str) -> None:
        if line not in self._told:
            self._told.add(line)
            self._said.append(line)


@dataclass(frozen=True, slots=True)
class Caller:
    """An episode that calls tools and records their results."""

    faults: ToolFaults
    episode: int
    row: Mapping[str, Any]

    @property
    def _prompt(self) -> str:
        return repr(self.row.get("prompt"))

    def answered(self, tool: str) -> None:
        if tool in self.faults.records:
            record = self.faults.records[tool]
            record.raising.answered(0)
            record.returning.answered(0)
            record.prompts.clear()

    def raised(self, tool: str, error: Exception) -> None:
        record = self.faults.record(tool)
        record.prompts.add(self._prompt)
        broken = record.raising.failed(0, self.episode, self._prompt, way(error))
        if broken and len(record.prompts) >= PROMPTS:
            mend = "fix it, or let it return the model's mistake as text"
            self._break(tool, record.raising, f"{told(error)}: {mend}")

    def returned(self, tool: str, kind: str) -> None:
        """Record a result of type ``kind`` that the model cannot read."""
        returning = self.faults.record(tool).returning
        error = f"it returned {kind}: let it return text or a JSON value"
        if returning.failed(0, self.episode, self._prompt, kind):
            self._break(tool, returning, error)
        else:
            self.faults.say(f"{KEY}: tool '{tool}': {error}")

    def _break(self, tool: str, failing: RewardFaults, error: str) -> None:
        failed, tried = failing.counts(0)
        self.faults.broken = f"{KEY}: tool '{tool}' failed {failed} of {tried}: {error}"


async def call(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call a function with any arguments. A plain one runs in a thread, because it may take long.

    Raises the function's errors. An error that would end the process, or cannot leave a thread,
    becomes a ``RuntimeError`` that names it.
    """
    try:
        if inspect.iscoroutinefunction(function):
            return await function(*args, **kwargs)
        result = await asyncio.to_thread(_whatever, function, args, kwargs)
        return await result if inspect.isawaitable(result) else result
    except (SystemExit, StopAsyncIteration) as error:
        raise RuntimeError(f"it raised {type(error).__name__}: {error}") from error


def _whatever(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    try:
        return function(*args, **kwargs)
    except (SystemExit, StopIteration) as error:
        raise RuntimeError(f"it raised {type(error).__name__}: {error}") from error


class EpisodeError(PlainError):
    """An environment failed. The message names it, the failure, and the key to change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """The answer of an environment.

    Args:
        messages: after the model's reply, none if the episode is over.
        reward: of this turn, or None if it has none.
        done: the episode is over.
        calls: number of tool calls in the reply.
        failed_calls: of these, those that raised, were not understood or name no tool.
        metrics: numbers to average over the step's episodes, by name.
    """

    messages: Sequence[Message] = ()
    reward: float | None = None
    done: bool = False
    calls: int = 0
    failed_calls: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """The beginning of an episode.

    Args:
        messages: after the row's prompt, before the model's first turn.
        prompt: replaces the row's prompt. None keeps it.
        tools: JSON schemas of tools for the chat template, beside the row's own.
        done: the episode is over before it began.
        reward: of an episode that was over.
    """

    messages: Sequence[Message] = ()
    prompt: Sequence[Message] | None = None
    tools: Sequence[Mapping[str, Any]] = ()
    done: bool = False
    reward: float | None = None


@runtime_checkable
class Environment(Protocol):
    """One episode, made anew for each response. Methods may also be plain functions, which run in a
    thread.

    The caller owns the conversation, its tokens, and the limits of turns, tokens and time. An error
    of a method fails only this response.
    """

    async def reset(self, row: Mapping[str, Any]) -> Sequence[Message] | Opening:
        """Begin with a row of the data. Return messages to add to its prompt, often none."""
        ...

    async def step(self, reply: Message) -> Turn:
        """Answer the model's reply (``role`` assistant, ``content``, and ``tool_calls`` if it made
        some)."""
        ...

    async def close(self) -> None:
        """End the episode, also if it was given up."""
        ...


class Factory(Protocol):
    """Makes the environments of a process, as ``environment.path`` names it. ``tools``: JSON
    schemas for the chat template."""

    tools: Sequence[Mapping[str, Any]]
    faults: ToolFaults

    async def open(self) -> None:
        """Start a server, a sandbox or whatever all episodes of the process share."""
        ...

    def make(self) -> Environment:
        """Make the environment of one episode. May take long, and may raise."""
        ...

    async def close(self) -> None: ...
