"""Environments of TRL's ``environment_factory``: their public methods are tools."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from rollpacker.env.adapters.rows import number, opened, taken
from rollpacker.env.base import EpisodeError, Message, Opening, ToolFaults, Turn, call
from rollpacker.env.tools import Schema, Tool, answer, tools_of

_NOT_TOOLS = ("reset", "get_reward", "close")


def schemas(made: type, where: str) -> list[Schema]:
    """Schemas of the tools of a class, in TRL's order. Raises ``ValueError``."""
    members = inspect.getmembers(made, predicate=inspect.isfunction)
    methods = [each for name, each in members if not (name.startswith("_") or name in _NOT_TOOLS)]
    return [tool.schema for tool in tools_of(methods, where).values()]


class TrlEnvironment:
    """``reset(**row)`` may return text, which comes behind the prompt; ``get_reward()``, where
    there is one, gives the episode's reward.

    Args:
        instance: for this episode alone.
        tools: schemas of its methods.
        faults: of all that call them in this process.
    """

    def __init__(
        self,
        instance: Any,
        tools: Sequence[Mapping[str, Any]],
        faults: ToolFaults | None = None,
    ) -> None:
        self._instance = instance
        self._faults = faults or ToolFaults()
        self._by = self._faults.caller({})
        found = [Tool(getattr(instance, _name(schema)), dict(schema)) for schema in tools]
        self._tools = {tool.name: tool for tool in found}

    async def reset(self, row: Mapping[str, Any]) -> Opening:
        """Begin with a row's columns."""
        self._by = self._faults.caller(row)
        reset = self._instance.reset
        said = await call(reset, **taken(reset, row))
        if said is not None and not isinstance(said, str):
            raise EpisodeError(f"reset returned {type(said).__name__}, not text or None")
        return opened(row, said or "")

    async def step(self, reply: Message) -> Turn:
        """Run the methods that a reply calls."""
        return await answer(self._tools, reply, self._by)

    async def final_reward(self) -> float | None:
        """What ``get_reward`` says; None without one."""
        reward = getattr(self._instance, "get_reward", None)
        return None if reward is None else number(await call(reward), "what get_reward returned")

    async def close(self) -> None:
        """Close it, if it can be."""
        close = getattr(self._instance, "close", None)
        if close is not None:
            await call(close)


def _name(schema: Mapping[str, Any]) -> str:
    return schema["function"]["name"]
