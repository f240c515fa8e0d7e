"""The one way to wait in tests, with an event loop or without, and who is waited for."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


def until(true: Callable[[], T], within_s: float = 60.0, every_s: float = 0.01) -> T:
    """What ``true`` gives as soon as that is true; too late is an error."""
    end = time.monotonic() + within_s
    while not (found := true()):
        assert time.monotonic() < end, "it did not come true"
        time.sleep(every_s)
    return found


async def soon(true: Callable[[], T], within_s: float = 60.0, every_s: float = 0.005) -> T:
    """``until``, while the event loop goes on."""
    async with asyncio.timeout(within_s):
        while not (found := true()):
            await asyncio.sleep(every_s)
    return found


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A test that is a coroutine, in an event loop of its own."""

    @wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


def alive(pid: int) -> bool:
    """Whether a process is, and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def children(pid: int) -> list[int]:
    """Of any of its threads."""
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += map(int, path.read_text().split())
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found
