"""Work that an error from elsewhere ends, wherever it is."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


class Breaker:
    """Ends a piece of work with an error; made and used in one event loop."""

    def __init__(self) -> None:
        self._error: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def trip(self, error: Exception) -> None:
        """End the work with an error; the first one counts."""
        if not self._error.done():
            self._error.set_exception(error)

    async def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Do the work, once. Raises what it raises, or what ``trip`` was told."""
        task = asyncio.create_task(work)
        try:
            await asyncio.wait((self._error, task), return_when=asyncio.FIRST_COMPLETED)
            (self._error if self._error.done() else task).result()
        finally:
            self._error.cancel()
            task.cancel()
            await asyncio.wait((task,))
            if not task.cancelled():
                task.exception()
