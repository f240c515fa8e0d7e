"""One run of a Python function that is the program: no process is started for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from rollpacker.env.agent.program import Ending
from rollpacker.env.base import call
from rollpacker.errors import told


class AgentFunction:
    """Calls ``function(row, base_url=..., api_key=...)``; what it returns is what a program prints
    last.

    Attributes:
        ended: how, once it is over.

    Made in an event loop. A coroutine is cancelled when it is stopped; a plain function, which has
    a thread of its own, is left to find out that nobody answers it.
    """

    def __init__(
        self, function: Callable[..., Any], row: Mapping[str, Any], *, base_url: str, api_key: str
    ) -> None:
        work = call(function, dict(row), base_url=base_url, api_key=api_key)
        self.ended = asyncio.get_running_loop().create_task(_live(work))

    async def stop(self, patience: float) -> None:
        """End it: it may do so itself for so many seconds."""
        await asyncio.wait({self.ended}, timeout=patience)
        self.ended.cancel()
        await asyncio.wait({self.ended})


async def _live(work: Any) -> Ending:
    try:
        result = await work
    except Exception as error:  # whatever a user's function raises
        return Ending(code=1, how="failed", stdout=b"", stderr=told(error).encode())
    return Ending(code=0, how="returned", stdout=b"", stderr=b"", result=result)
