"""An environment that does what the model's reply says, for tests of the processes that hold it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rollpacker.env.base import Message, Turn

YES: list[Message] = [{"role": "user", "content": "yes"}]


class Stop(BaseException):
    """What ``except Exception`` does not catch."""


def sockets() -> list[int]:
    """This process's."""
    found: list[int] = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                found.append(int(name))
    return found


def write_everywhere(data: bytes) -> None:
    """Into every socket: one of them leads to the driver."""
    for descriptor in sockets():
        with contextlib.suppress(OSError):
            os.write(descriptor, data)


def fork() -> None:
    """A child that has every socket too, and outlives this process."""
    if os.fork() == 0:
        time.sleep(1000.0)
        os._exit(0)


async def deaf() -> None:
    """Goes on where it is told to stop."""
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(1000.0)


async def cancelled() -> None:
    raise asyncio.CancelledError


async def raises(error: BaseException) -> None:
    raise error


AWAITED: Mapping[str, Callable[[], Any]] = {
    "hang": lambda: asyncio.sleep(1000.0),
    "hang deaf": deaf,
    "hang in a thread": lambda: asyncio.to_thread(time.sleep, 1000.0),
    "raise": lambda: raises(KeyError("board")),
    "raise timeout": lambda: raises(TimeoutError("the server timed out")),
    "raise more": lambda: raises(Stop("base")),
    "raise half": lambda: raises(ValueError("no such word: \ud83d")),
    "cancel": cancelled,
}
DONE: Mapping[str, Callable[[], Any]] = {
    "block": lambda: time.sleep(1000.0),
    "exit": lambda: os._exit(3),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "nonsense": lambda: write_everywhere(b"\x05\0\0\0hello"),
    "flood": lambda: write_everywhere(b"\xff\xff\xff\x7f"),
    "fork and exit": lambda: (fork(), os._exit(3)),
}
TURNS: Mapping[str, Callable[[], Any]] = {
    "end": lambda: Turn(done=True, reward=1.0),
    "true": lambda: Turn(done=True, reward=True),
    "one": lambda: Turn(done=True, reward=np.float32(0.5)),  # pyright: ignore[reportArgumentType]
    "nan": lambda: Turn(done=True, reward=float("nan")),
    "text": lambda: Turn(done=True, reward="1"),  # pyright: ignore[reportArgumentType]
    "odd metric": lambda: Turn(done=True, metrics={"a": "b"}),  # pyright: ignore
    "metric": lambda: Turn(messages=YES, metrics={"a": np.float32(2.0)}),  # pyright: ignore
    "half metric": lambda: Turn(messages=YES, metrics={"x\ud83d": 1.0}),
    "many calls": lambda: Turn(messages=YES, calls=1 << 70),
    "fewer calls": lambda: Turn(messages=YES, calls=-1),
    "many metrics": lambda: Turn(messages=YES, metrics={str(n): 1.0 for n in range(1001)}),
    "odd calls": lambda: Turn(messages=YES, calls="all"),  # pyright: ignore
    "odd message": lambda: Turn(messages=[YES[0] | {"extra": object()}]),
    "odd key": lambda: Turn(messages=[YES[0] | {1: 2}]),  # pyright: ignore
    "long": lambda: Turn(messages=[{"role": "user", "content": "7" * 3_000_000}]),
    "huge": lambda: Turn(messages=[{"role": "user", "content": "7" * (65 << 20)}]),
}


class Unruly:
    """Each step does what the reply says; ``row["reset"]`` is done at its beginning, and
    ``row["close"]`` at its end.

    Args:
        folder: where it says what it has done.
    """

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._name = ""
        self._closing = ""

    async def reset(self, row: Mapping[str, Any]) -> Sequence[Message]:
        self._name = str(row.get("name", ""))
        self._mark(f"began-{self._name}")
        self._closing = str(row.get("close", ""))
        if row.get("reset") == "huge":
            return [{"role": "user", "content": "7 " * (32 << 20)}]
        if "reset" in row:
            await self._do(str(row["reset"]))
        return []

    async def step(self, reply: Message) -> Turn:
        said = str(reply["content"])
        self._mark(f"acting-{self._name}")
        if said == "note":
            reply["parsed"] = object()
            return Turn(done=True)
        return await self._do(said)

    async def _do(self, what: str) -> Turn:
        if what in AWAITED:
            await AWAITED[what]()
        if what == "die later":
            threading.Thread(target=self._die_when_told, daemon=True).start()
        if what == "leak":
            child = subprocess.Popen(["sleep", "1000"])
            self._mark(f"leaked-{child.pid}")
        if what in DONE:
            DONE[what]()
        return TURNS[what]() if what in TURNS else Turn(messages=YES)

    def _die_when_told(self) -> None:
        while not (self._folder / "die").exists():
            time.sleep(0.005)
        os._exit(3)

    def _mark(self, name: str) -> None:
        (self._folder / name).touch()

    async def close(self) -> None:
        if self._closing == "slow":
            await asyncio.sleep(1000.0)
        if self._closing in DONE:
            DONE[self._closing]()
        self._mark(f"closed-{self._name}")


class Slow(Unruly):
    """Takes its time to be made."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        self._mark("making")
        while not (self._folder / "made").exists():
            time.sleep(0.005)


def double(number: int) -> int:
    """Twice a number.

    Args:
        number: to double.
    """
    return 2 * number
