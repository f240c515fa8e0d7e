"""HTTP/1.1 of uvicorn with a limit on connections and on the time that headers take."""

from __future__ import annotations

import asyncio
import json

from uvicorn.protocols.http.h11_impl import H11Protocol

from rollpacker.rollmux.service.guard import MAX_HEADERS


class PatientProtocol(H11Protocol):
    """Closes connections that are too many or that send their headers too slowly."""

    head_s = 10.0
    """Seconds in which headers have to be there."""
    max_connections = 512
    _head: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client is there; one too many is turned away."""
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            error = f"at most {self.max_connections} connections"
            self._plain("503 Service Unavailable", error)
        else:
            self._head = self.loop.call_later(self.head_s, self.transport.close)

    def data_received(self, data: bytes) -> None:
        """Bytes of a request."""
        if self._head is None and not self._busy():
            self._head = self.loop.call_later(self.head_s, self.transport.close)
        super().data_received(data)
        if self._busy():
            self._forget_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone."""
        self._forget_head()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP, or has too many headers."""
        self._plain("400 Bad Request", f"not a request: {msg} Headers: at most {MAX_HEADERS} bytes")

    def _plain(self, status: str, error: str) -> None:
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
