"""Environments of all kinds of character. What they answer is a function of what they are told, so
that runs can be compared."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from rollpacker.env.base import Message, Opening, Turn


class Echo:
    """Ends when three divides the number of characters that it is told, or after three turns."""

    def __init__(self, pause_s: float = 0.0) -> None:
        self._turns = 0
        self._pause_s = pause_s

    def reset(self, row: Mapping[str, Any]) -> Sequence[Message]:
        return [{"role": "user", "content": "more"}] if int(row["id"][1:]) % 3 == 0 else []

    async def step(self, reply: Message) -> Turn:
        said = str(reply["content"])
        self._turns += 1
        await asyncio.sleep(self._pause_s * (len(said) % 5))
        reward = said.count("1") + len(said) / 100
        if len(said) % 3 == 0 or self._turns == 3:
            return Turn(done=True, reward=reward)
        answer = {"role": "user", "content": str(len(said) % 10) * (1 + len(said) % 3)}
        return Turn(messages=[answer], reward=reward, calls=1, metrics={"said": float(len(said))})

    async def close(self) -> None:
        pass


class Bad(Echo):
    """Some prompts' do something bad at their first turn, or at once: ``how``, by number."""

    def __init__(self, how: Mapping[str, str]) -> None:
        super().__init__()
        self._all = how
        self._how = ""

    def reset(self, row: Mapping[str, Any]) -> Sequence[Message] | Opening:
        self._how = self._all.get(str(int(row["id"][1:])), "")
        if self._how == "raises at once":
            raise ValueError("no such game")
        return Opening(done=True, reward=1.0) if self._how == "over at once" else []

    async def step(self, reply: Message) -> Turn:
        match self._how:
            case "raises":
                raise KeyError("board")
            case "hangs":
                await asyncio.sleep(1000.0)
            case "blocks":
                time.sleep(1000.0)
            case "exits":
                os._exit(3)
            case "is killed":
                os.kill(os.getpid(), signal.SIGKILL)
            case "garbage":
                return {"reward": 1}  # pyright: ignore[reportReturnType]
            case "says nothing":
                return Turn()
            case "bytes":
                picture = {"role": "tool", "content": "see", "image": b"\xff", "at": datetime.now()}
                self._turns += 1
                return Turn(messages=[picture], done=self._turns > 1, reward=0.25)
            case "megabytes":
                return Turn(messages=[{"role": "user", "content": "7" * 3_000_000}])
            case _:
                pass
        return await super().step(reply)
