"""The environment protocol, and what an episode is made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from rollpacker.chat import Message
from rollpacker.env.tool_faults import ToolFaults
from rollpacker.errors import PlainError


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
