"""A client's connection in the event loop: its requests one after the other."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Hashable, Mapping

from rollpacker.connection_limits import ConnectionPlace, Places
from rollpacker.env.agent.server.http import (
    CONTINUE,
    HttpRequest,
    HttpResponse,
    RefusedError,
    RequestReader,
)

_log = logging.getLogger(__name__)
_HEAD_S = 10.0
"""In which a stranger has to send the headers of a request."""
_AHEAD = 1 << 20
"""Bytes of further requests that are kept while one is answered."""
Handle = Callable[[HttpRequest], Awaitable[HttpResponse]]
"""Answers a request; cancelled when the client has gone."""
Check = Callable[[Mapping[str, str]], Hashable]
"""Whose request has these headers; raises ``RefusedError`` where they are enough to refuse it."""


_FAILED = RefusedError(400, "this request could not be answered: see the run's log", "failed")
"""A status that clients do not ask again on: it would fail again."""


class ClientConnection(asyncio.Protocol):
    """One client.

    Args:
        handle: answers its requests.
        check: of their headers, before their bodies are read.
        places: of all connections; it is closed where it has to make way.
    """

    def __init__(self, handle: Handle, check: Check, places: Places) -> None:
        self._handle = handle
        self._check = check
        self._places = places
        self._reader = RequestReader(self._look)
        self._task: asyncio.Task[None] | None = None
        self._transport: asyncio.Transport | None = None
        self._place: ConnectionPlace
        self._patience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The client is there."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._place = self._places.take(self.abort)
        self._patience = asyncio.get_running_loop().call_later(_HEAD_S, self.abort)

    def _look(self, headers: Mapping[str, str]) -> None:
        who = self._check(headers)
        self._wait_no_longer()
        self._places.know(self._place, who)

    def data_received(self, data: bytes) -> None:
        """It says something: a part of a request, or some."""
        if self._task is not None and self._reader.unread > _AHEAD:
            self.abort()
        else:
            self._guarded(lambda: self._reader.feed(data))

    def _guarded(self, first: Callable[[], None] = lambda: None) -> None:
        """Go on; where that cannot be, this connection ends, and no other."""
        try:
            first()
            self._go_on()
        except RefusedError as error:
            self._end(error.response())
        except Exception:
            _log.exception("a connection to the agents' endpoint failed")
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """It is closed, by whomever; the client may still have been waiting for a response."""
        self._give_up()
        self._wait_no_longer()
        self._places.leave(self._place)

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

    async def _answer(self, request: HttpRequest) -> None:
        self._places.answering(self._place, True)
        try:
            response = await self._handle(request)
        except Exception:
            _log.exception("a request to the agents' endpoint failed")
            response = _FAILED.response()
        self._places.answering(self._place, False)
        self._task = None
        if request.last:
            self._end(response)
            return
        self._write(response.encoded(last=False))
        self._guarded()

    def _end(self, response: HttpResponse) -> None:
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

    def _wait_no_longer(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None
