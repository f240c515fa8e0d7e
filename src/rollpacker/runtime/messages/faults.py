"""Faults of workers, and the errors that the driver raises for them."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from rollpacker.errors import one_line


class WorkerError(RuntimeError):
    """A worker has died or cannot carry out a command."""


class NoRoomError(ValueError):
    """A cluster has no room for a run, at least for the moment."""


def in_one_line(error: Exception) -> Exception:
    """An error for the user. One that is not for people gets the place where it was raised."""
    if isinstance(error, ValueError | RuntimeError | OSError):
        return error
    last = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{Path(last.filename).name}:{last.lineno} in {last.name}"
    told = RuntimeError(f"the driver failed: {one_line(error)} ({place})")
    told.__cause__ = error
    return told


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Why a command failed.

    Args:
        kind: ``user``: a mistake of the configuration or the model. ``storage``: a disk's error,
            which may pass. ``crash``: the worker cannot go on.
        text: one line for the first two, a traceback or one line for a crash.
    """

    kind: Literal["user", "storage", "crash"]
    text: str

    def error(self) -> Exception:
        match self.kind:
            case "user":
                return ValueError(self.text)
            case "storage":
                return OSError(self.text)
            case "crash":
                return WorkerError(self.text)


_T = TypeVar("_T")


class Breaker:
    """Ends work with an error of ``trip`` or of an event loop's callback. It is used once."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._error: asyncio.Future[None] = self._loop.create_future()

    def trip(self, error: Exception) -> None:
        """End the work with an error. The first one counts."""
        if not self._error.done():
            self._error.set_exception(error)

    async def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run the work once. Raises its error, that of ``trip``, or a callback's in one line."""
        before = self._loop.get_exception_handler()
        self._loop.set_exception_handler(self._hear)
        task = asyncio.create_task(work)
        try:
            await asyncio.wait((self._error, task), return_when=asyncio.FIRST_COMPLETED)
            if self._error.done():
                self._error.result()
            return task.result()
        finally:
            self._error.cancel()
            task.cancel()
            await asyncio.wait((task,))
            if not task.cancelled():
                task.exception()
            self._loop.set_exception_handler(before)

    def _hear(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if "handle" in context and isinstance(error, Exception):
            self.trip(in_one_line(error))
        else:  # such as a future whose error nobody has read
            loop.default_exception_handler(context)


def spawn(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Run work in the background. Its error counts as a callback's. The caller keeps the task."""
    task = asyncio.create_task(work)
    task.add_done_callback(_look_at)
    return task


def _look_at(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        task.result()
