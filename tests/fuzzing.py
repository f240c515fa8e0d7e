"""Messages that none of our processes writes: valid ones with a part put amiss, cut, or noise."""

from __future__ import annotations

import math
import random
import socket
from collections.abc import Callable
from typing import Any

from rollpacker.processes.frames import frame

ODD: tuple[Callable[[random.Random], Any], ...] = (
    lambda _: None,
    lambda _: True,
    lambda _: -1,
    lambda _: 2**63,
    lambda _: 2**64 - 1,
    lambda rng: rng.randrange(-(2**31), 2**31),
    lambda _: math.nan,
    lambda _: math.inf,
    lambda _: -0.0,
    lambda _: 1e308,
    lambda _: "",
    lambda rng: "x" * rng.choice((1, 100, 20_000)),
    lambda _: "\0\x1b]0;owned\x07\u202e\u2028",
    lambda _: "../../etc/passwd",
    lambda rng: bytes(rng.randrange(256) for _ in range(rng.randrange(9))),
    lambda rng: [[]] * rng.choice((0, 1, 1000)),
    lambda rng: nested(rng.choice((3, 40, 300))),
    lambda _: {"": {}, "a": 1},
    lambda _: {str(n): n for n in range(2000)},
)


def nested(depth: int) -> Any:
    """Lists within lists."""
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


def amiss(value: Any, rng: random.Random) -> Any:
    """The same but for one part."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        name = rng.choice(sorted(value))
        how = rng.random()
        if how < 0.15:
            return {key: each for key, each in value.items() if key != name}
        if how < 0.25:
            return {**value, rng.choice(("", "extra", "__class__", name + " ")): 1}
        return {**value, name: amiss(value[name], rng)}
    if isinstance(value, list) and value and rng.random() < 0.7:
        at = rng.randrange(len(value))
        return [*value[:at], amiss(value[at], rng), *value[at + 1 :]]
    return rng.choice(ODD)(rng)


def torn(data: bytes, rng: random.Random) -> bytes:
    """The same but for some bytes, or without its end."""
    if not data or rng.random() < 0.3:
        return data[: rng.randrange(len(data) + 1)]
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 3, 20))):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)


class Child:
    """In the place of a driver's child process: what it would write the test writes."""

    def __init__(self) -> None:
        self.ours, self.end = socket.socketpair()
        self.alive = True

    def write(self, payload: bytes) -> None:
        """A frame."""
        self.end.setblocking(True)
        self.end.sendall(frame(payload))

    def poll(self) -> int | None:
        """As ``Popen`` says it."""
        return None if self.alive else -9


def kill(holder: Any) -> str:
    """In the place of ``kill`` of whoever holds it."""
    holder.popen.alive = False
    holder.popen.end.close()
    holder.channel.close()
    return "was killed"
