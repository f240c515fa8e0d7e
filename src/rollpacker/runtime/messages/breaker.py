"""Work that an error from elsewhere ends, wherever it is.

What a callback raises (of a reader, a timer, a task that nobody awaits) is nobody's: the event loop
prints it and goes on, and who waits for what the callback should have brought waits for ever. All
that a driver waits for therefore runs in a ``Breaker``, and all that runs beside it is spawned.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from rollpacker.runtime.messages.faults import in_one_line

_T = TypeVar("_T")


class Breaker:
    """Ends a piece of work with an error: one that it is told, or that a callback of the event loop
    raises meanwhile. Made and used once, in one event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._error: asyncio.Future[None] = self._loop.create_future()

    def trip(self, error: Exception) -> None:
        """End the work with an error; the first one counts."""
        if not self._error.done():
            self._error.set_exception(error)

    async def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Do the work, once. Raises what it raises, what ``trip`` was told, or, in one line, what a
        callback raised."""
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
        else:  # a future that nobody asked for its error, for one
            loop.default_exception_handler(context)


def spawn(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Do work beside what the driver waits for; what it raises is a callback's error. The caller
    keeps the task."""
    task = asyncio.create_task(work)
    task.add_done_callback(_look_at)
    return task


def _look_at(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        task.result()
