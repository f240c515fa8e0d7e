"""The environment protocol, and what an episode is made of."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from rollpacker.chat import Message
from rollpacker.errors import PlainError, told, way
from rollpacker.policy.grading import PROMPTS, RewardFaults

# Nobody sees whose fault a raising call is, so a tool is given the patience of a reward that has
# answered before, and any answer speaks for it. A result without a JSON form is the tool's fault.

KEY = "environment.path"


@dataclass(slots=True)
class ToolRecord:
    """Of one tool."""

    raising: RewardFaults = field(default_factory=lambda: RewardFaults(1, patient=[0]))
    returning: RewardFaults = field(default_factory=lambda: RewardFaults(1))
    prompts: set[str] = field(default_factory=set[str])
    """Of calls that raised since the last answer."""


class ToolFaults:
    """Counts calls of the tools of a process that fail."""

    def __init__(self) -> None:
        self.records: dict[str, ToolRecord] = {}
        self._episodes = 0
        self._told: set[str] = set()
        self._said: list[str] = []
        self.broken: str | None = None
        """Why the run cannot go on."""

    def said(self) -> list[str]:
        """What the user should know and was not told yet."""
        said, self._said = self._said, []
        return said

    def caller(self, row: Mapping[str, Any]) -> Caller:
        """A new episode, which calls tools."""
        self._episodes += 1
        return Caller(self, self._episodes, row)

    def record(self, tool: str) -> ToolRecord:
        """What is known of a tool."""
        return self.records.setdefault(tool, ToolRecord())

    def say(self, line: str) -> None:
        """Tell the user once."""
        if line not in self._told:
            self._told.add(line)
            self._said.append(line)


@dataclass(frozen=True, slots=True)
class Caller:
    """An episode that calls tools, and records what comes of it."""

    faults: ToolFaults
    episode: int
    row: Mapping[str, Any]

    @property
    def _prompt(self) -> str:
        return repr(self.row.get("prompt"))

    def answered(self, tool: str) -> None:
        """A call was answered."""
        if tool in self.faults.records:
            record = self.faults.records[tool]
            record.raising.answered(0)
            record.returning.answered(0)
            record.prompts.clear()

    def raised(self, tool: str, error: Exception) -> None:
        """A call raised."""
        record = self.faults.record(tool)
        record.prompts.add(self._prompt)
        broken = record.raising.failed(0, self.episode, self._prompt, way(error))
        if broken and len(record.prompts) >= PROMPTS:
            mend = "mend it, or let it return as text what the model did wrong"
            self._break(tool, record.raising, f"{told(error)}; {mend}")

    def returned(self, tool: str, kind: str) -> None:
        """A call returned what the model cannot read: a value of type ``kind``."""
        returning = self.faults.record(tool).returning
        error = f"it returned {kind}; let it return text, or what JSON has"
        if returning.failed(0, self.episode, self._prompt, kind):
            self._break(tool, returning, error)
        else:
            self.faults.say(f"{KEY}: tool '{tool}': {error}")

    def _break(self, tool: str, failing: RewardFaults, error: str) -> None:
        failed, tried = failing.counts(0)
        self.faults.broken = f"{KEY}: tool '{tool}' failed {failed} of {tried}: {error}"


async def call(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """The result of a function; a plain one runs in a thread, for it may take its time. It may take
    arguments of any name.

    Raises what it raises; what would end the process, or cannot leave a thread, is a
    ``RuntimeError`` that names it.
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
    """An environment failed; the message says which, how, and what to change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What an environment answers.

    Args:
        messages: that follow the model's reply; none where the episode is over.
        reward: of this turn; None: it has none.
        done: the episode is over.
        calls: tools that the reply called.
        failed_calls: of these, those that raised, were not understood or do not exist.
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
    """How an episode begins.

    Args:
        messages: that follow the row's prompt, before the model's first turn.
        prompt: takes the place of the row's prompt; None keeps it.
        tools: JSON schemas of tools for the chat template, beside the row's own.
        done: the episode is over before it began.
        reward: of an episode that was.
    """

    messages: Sequence[Message] = ()
    prompt: Sequence[Message] | None = None
    tools: Sequence[Mapping[str, Any]] = ()
    done: bool = False
    reward: float | None = None


@runtime_checkable
class Environment(Protocol):
    """One episode. A new one is made for each response; all methods may also be plain functions,
    which run in a thread.

    The base owns the conversation, its tokens, limits of turns, tokens and time, and what becomes
    of failures: what a method raises is this response's own.
    """

    async def reset(self, row: Mapping[str, Any]) -> Sequence[Message] | Opening:
        """Begin with a row of the data: messages that are added to its prompt, often none."""
        ...

    async def step(self, reply: Message) -> Turn:
        """Answer the model's reply (``role`` assistant, ``content``, ``tool_calls`` where it made
        some)."""
        ...

    async def close(self) -> None:
        """The episode is over, or was given up."""
        ...


class Factory(Protocol):
    """What a process has loaded by ``environment.path``: makes an environment for each episode.

    Attributes:
        tools: JSON schemas of the tools that all of them have, for the chat template.
        faults: of these tools.
    """

    tools: Sequence[Mapping[str, Any]]
    faults: ToolFaults

    async def open(self) -> None:
        """Begin what all episodes of the process share (a server, a sandbox)."""
        ...

    def make(self) -> Environment:
        """One for one episode; may take its time, and may raise."""
        ...

    async def close(self) -> None:
        """The process ends."""
        ...
