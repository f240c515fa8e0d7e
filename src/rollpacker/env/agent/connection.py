"""A client's connection in the event loop: its requests one after the other."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from rollpacker.env.agent.http import CONTINUE, RefusedError, Request, RequestReader, Response

Handle = Callable[[Request], Awaitable[Response]]
"""Answers a request; cancelled when the client has gone. Never raises."""
Check = Callable[[Mapping[str, str]], object]
"""Raises ``RefusedError`` where a request's headers are enough to refuse it."""


class Connection(asyncio.Protocol):
    """One client.

    Args:
        handle: answers its requests.
        check: of their headers, before their bodies are read.
        others: all connections, to which it adds itself while it lasts.
    """

    def __init__(self, handle: Handle, check: Check, others: set[Connection]) -> None:
        self._handle = handle
        self._others = others
        self._reader = RequestReader(check)
        self._task: asyncio.Task[None] | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The client is there."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._others.add(self)

    def data_received(self, data: bytes) -> None:
        """It says something: a part of a request, or some."""
        try:
            self._reader.feed(data)
            self._go_on()
        except RefusedError as error:
            self._end(error.response())

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """It is closed, by whomever; the client may still have been waiting for a response."""
        self._give_up()
        self._others.discard(self)

    def abort(self) -> None:
        """Close it at once."""
        self._give_up()
        if self._transport is not None:
            self._transport.abort()

    def _go_on(self) -> None:
        if self._task is not None:
            return
        request = self._reader.next()
        if request is not None:
            self._task = asyncio.get_running_loop().create_task(self._answer(request))
        elif self._reader.waited_for:
            self._reader.waited_for = False
            self._write(CONTINUE)

    async def _answer(self, request: Request) -> None:
        response = await self._handle(request)
        if request.last:
            self._task = None
            self._end(response)
            return
        self._write(response.encoded(last=False))
        self._task = None
        try:
            self._go_on()
        except RefusedError as error:
            self._end(error.response())

    def _end(self, response: Response) -> None:
        self._write(response.encoded(last=True))
        self._give_up()
        if self._transport is not None:
            self._transport.close()

    def _write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def _give_up(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = None
