"""Functions of a user's, plain or async, called from the event loop."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any


async def call(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """The result of a function; a plain one runs in a thread, for it may take its time. It may take
    arguments of any name.

    Raises what it raises; what would end the process, or cannot leave a thread, is a
    ``RuntimeError`` that names it.
    """
    try:
        if inspect.iscoroutinefunction(function):
            return await function(*args, **kwargs)
        result = await asyncio.to_thread(_whatever, function, args, kwargs)
        return await result if inspect.isawaitable(result) else result
    except (SystemExit, StopAsyncIteration) as error:
        raise RuntimeError(f"it raised {type(error).__name__}: {error}") from error


def _whatever(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    try:
        return function(*args, **kwargs)
    except (SystemExit, StopIteration) as error:
        raise RuntimeError(f"it raised {type(error).__name__}: {error}") from error
