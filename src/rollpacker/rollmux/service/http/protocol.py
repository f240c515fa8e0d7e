"""HTTP/1.1 of uvicorn, with connection limits and a time limit for headers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Hashable
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from rollpacker.connection_limits import ConnectionPlace, Places
from rollpacker.rollmux.service.http.app import HANG_UP, KNOWN, MAX_HEADERS


class PatientProtocol(H11Protocol):
    """Closes connections with slow headers, and those that must make way for others."""

    head_s = 10.0

    def __init__(self, *, places: Places, **more: Any) -> None:
        super().__init__(**more)
        self._places = places
        self._place: ConnectionPlace
        self._head: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._place = self._places.take(self._make_way)
        self._head = self.loop.call_later(self.head_s, self.transport.close)

    def data_received(self, data: bytes) -> None:
        if self._head is None and not self._busy():
            self._head = self.loop.call_later(self.head_s, self.transport.close)
        super().data_received(data)
        self._look()

    def on_response_complete(self) -> None:
        """After an answer, the next request may be there already."""
        self._places.answering(self._place, False)
        super().on_response_complete()
        self._look()

    def _look(self) -> None:
        """Note a request that has arrived, before it is handled."""
        if self._busy():
            self._forget_head()
            self._places.answering(self._place, True)
            more: Any = self.scope
            more[KNOWN], more[HANG_UP] = self._know, self.transport.abort

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_head()
        self._places.leave(self._place)
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        self._plain("400 Bad Request", f"not a request: {msg} Headers: at most {MAX_HEADERS} bytes")

    def _know(self, who: Hashable) -> None:
        self._places.know(self._place, who)

    def _make_way(self) -> None:
        error = "too many open connections: reuse one, and close it"
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
