"""Environments of skyrl-gym: ``init(prompt)``, ``step(action)``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rollpacker.env.adapters.rows import number, prompt_of
from rollpacker.env.base import EpisodeError, Message, Opening, Turn, call
from rollpacker.env.calls import values
from rollpacker.env.conversation import said


class SkyrlEnvironment:
    """It is made of its row, which skyrl-gym calls ``extras``.

    Args:
        make: makes one.
        extras: whether it takes the row.
    """

    def __init__(self, make: Callable[..., Any], extras: bool) -> None:
        self._make = make
        self._extras = extras
        self._instance: Any = None

    async def reset(self, row: Mapping[str, Any]) -> Opening:
        """Make one, which may put a prompt of its own in the row's place."""
        self._instance = await call(self._make, **({"extras": dict(row)} if self._extras else {}))
        prompt = prompt_of(row)
        result = await call(self._instance.init, prompt_of(row))
        begun = list(result[0] if isinstance(result, tuple) else result)
        return Opening() if begun == prompt else Opening(prompt=begun)

    async def step(self, reply: Message) -> Turn:
        """Act by a reply's whole text."""
        output = await call(self._instance.step, said(reply))
        if not isinstance(output, Mapping) or "done" not in output:
            raise EpisodeError(f"step returned {output!r:.80}, without observations and done")
        done = bool(output["done"])
        return Turn(
            messages=() if done else list(output.get("observations") or ()),
            reward=number(output.get("reward"), "the reward of step"),
            done=done,
            metrics=await self._metrics() if done else {},
        )

    async def _metrics(self) -> dict[str, float]:
        metrics = getattr(self._instance, "get_metrics", None)
        found = {} if metrics is None else await call(metrics)
        numbers = {str(name): values.number(value) for name, value in found.items()}
        return {name: value for name, value in numbers.items() if value is not None}

    async def close(self) -> None:
        """Close it."""
        close = getattr(self._instance, "close", None)
        if close is not None:
            await call(close)
