"""Calls of Ray actors that end with whoever waits for them.

Cancelling what waits for an actor's call leaves the call running, and verl's own way to abort a
request does not reach vLLM where that renames requests. ``ray.cancel`` raises in the actor's
coroutine, which every server answers by dropping the request.
"""

from __future__ import annotations

import asyncio
from typing import Any

import ray  # pyright: ignore[reportMissingImports]

from rollpacker.verl.host import PlainClient


class Cancelling:
    """An actor's handle, whose calls are cancelled with the coroutine that waits for them."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def __getattr__(self, name: str) -> Any:
        return _Method(getattr(self._actor, name))


class _Method:
    """A method of such a handle."""

    def __init__(self, method: Any) -> None:
        self._method = method

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        """Call it; the result is to be awaited."""
        return _result(self._method.remote(*args, **kwargs))


async def _result(reference: Any) -> Any:
    """What a call returns or raises; a cancelled wait ends when the call has ended."""
    waiting = asyncio.ensure_future(_value(reference))
    try:
        return await asyncio.shield(waiting)
    except asyncio.CancelledError:
        ray.cancel(reference)
        await asyncio.wait([waiting])
        if not waiting.cancelled():
            waiting.exception()  # that it was cancelled is no news
        raise


async def _value(reference: Any) -> Any:
    return await reference


class _Cancelled:
    """The handle of an actor that is not to be called any more."""

    def __getattr__(self, name: str) -> Any:
        return self

    def remote(self, *_args: Any, **_kwargs: Any) -> Any:
        """The wait for it was cancelled."""
        raise asyncio.CancelledError


class CancellingClient(PlainClient):
    """verl's client of its servers; who stops waiting for a response stops its request."""

    async def _acquire_server(self, request_id: str, **extra: Any) -> tuple[str, Any]:
        acquiring = asyncio.ensure_future(super()._acquire_server(request_id, **extra))
        try:
            name, server = await asyncio.shield(acquiring)
        except asyncio.CancelledError:
            # The balancer has counted it, and verl releases only what it was given.
            name, _ = await acquiring
            return name, _Cancelled()
        return name, Cancelling(server)
