"""Environments of gem and others like Gymnasium's: text in, ``(observation, reward, ...)`` out."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from rollpacker.env.adapters.rows import number, opened, seed_of, taken, user
from rollpacker.env.base import EpisodeError, Message, Opening, Turn, call
from rollpacker.env.calls.values import shown
from rollpacker.env.conversation import said

_LENGTHS = (4, 5)
"""Of what ``step`` returns: with ``done``, or with ``terminated`` and ``truncated``."""


class GymEnvironment:
    """Observations are the user's messages; the first comes behind the row's prompt. A row's
    responses all begin with the same seed.

    Args:
        instance: for this episode alone.
        alone: held while one begins: a seed may be the whole process's.
    """

    def __init__(self, instance: Any, alone: asyncio.Lock) -> None:
        self._instance = instance
        self._alone = alone

    async def reset(self, row: Mapping[str, Any]) -> Opening:
        """Begin with a row's seed."""
        reset = self._instance.reset
        async with self._alone:
            result = await call(reset, **taken(reset, {"seed": seed_of(row)}))
        return opened(row, observed(result[0] if isinstance(result, tuple) else result))

    async def step(self, reply: Message) -> Turn:
        """Act by a reply's whole text."""
        result = await call(self._instance.step, said(reply))
        if not isinstance(result, tuple) or len(result) not in _LENGTHS:
            raise EpisodeError(
                f"step returned {type(result).__name__}, not a tuple of observation, reward, "
                "terminated, truncated and info: as its reset takes no row, it was taken for an "
                "environment of gem or Gymnasium"
            )
        observation, reward, *ends, _ = result
        done = any(bool(end) for end in ends)
        return Turn(
            messages=() if done else user(observed(observation)),
            reward=number(reward, "the reward of step"),
            done=done,
        )

    async def close(self) -> None:
        """Close it, if it can be."""
        close = getattr(self._instance, "close", None)
        if close is not None:
            await call(close)


def observed(observation: Any) -> str:
    """An observation as text: as it is, or as JSON."""
    return "" if observation is None else shown(observation)
