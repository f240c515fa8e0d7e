"""HTTP/1.1 of uvicorn, with places for connections and a limit on the time that headers take."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Hashable
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from rollpacker.connection_limits import ConnectionPlace, Places
from rollpacker.rollmux.service.http.app import HANG_UP, KNOWN, MAX_HEADERS


class PatientProtocol(H11Protocol):
    """Closes connections that send their headers too slowly, and those that have to make way."""

    head_s = 10.0
    """Seconds in which headers have to be there."""

    def __init__(self, *, places: Places, **more: Any) -> None:
        super().__init__(**more)
        self._places = places
        self._place: ConnectionPlace
        self._head: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client is there."""
        super().connection_made(transport)
        self._place = self._places.take(self._make_way)
        self._head = self.loop.call_later(self.head_s, self.transport.close)

    def data_received(self, data: bytes) -> None:
        """Bytes of a request."""
        if self._head is None and not self._busy():
            self._head = self.loop.call_later(self.head_s, self.transport.close)
        super().data_received(data)
        self._look()

    def on_response_complete(self) -> None:
        """The answer is out; the next request may be there already."""
        self._places.answering(self._place, False)
        super().on_response_complete()
        self._look()

    def _look(self) -> None:
        """A request that has come is not looked at by anybody yet."""
        if self._busy():
            self._forget_head()
            self._places.answering(self._place, True)
            more: Any = self.scope
            more[KNOWN], more[HANG_UP] = self._know, self.transport.abort

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone."""
        self._forget_head()
        self._places.leave(self._place)
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP, or has too many headers."""
        self._plain("400 Bad Request", f"not a request: {msg} Headers: at most {MAX_HEADERS} bytes")

    def _know(self, who: Hashable) -> None:
        self._places.know(self._place, who)

    def _make_way(self) -> None:
        error = "too many connections are open: send requests on one, and close it"
        self._plain("503 Service Unavailable", error)

    def _plain(self, status: str, error: str) -> None:
        if self.transport.is_closing():
            return
        body = json.dumps({"error": error})
        self.transport.write(
            f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\nconnection: close\r\n"
            f"retry-after: 1\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode()
        )
        self.transport.close()

    def _busy(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _forget_head(self) -> None:
        if self._head is not None:
            self._head.cancel()
            self._head = None
