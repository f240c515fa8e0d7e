"""How a driver and a worker talk, whatever lies between them."""

from __future__ import annotations

from typing import Any, Protocol


class Channel(Protocol):
    """One end of a connection: whole messages, in order, none lost while both ends live."""

    def send(self, obj: Any, /) -> None:
        """Send a message. Raises ``BrokenPipeError`` or ``ConnectionResetError`` when the other
        end is gone, ``BlockingIOError`` when it takes nothing for long."""
        ...

    def recv(self) -> Any:
        """Wait for the next message. Raises ``EOFError`` or ``OSError`` when the other end is
        gone, ``BlockingIOError`` when it stops within a message."""
        ...

    def fileno(self) -> int:
        """Readable when a message, or the end, has come."""
        ...

    def close(self) -> None:
        """Say no more; the other end will see it."""
        ...


class Host(Protocol):
    """What a worker runs in, from the driver's side."""

    channel: Channel

    @property
    def pid(self) -> int:
        """Its process, on whatever node that is; 0 when it is not known."""
        ...

    def wait(self, seconds: float) -> None:
        """Give it so long to end by itself."""
        ...

    def kill(self) -> None:
        """End it at once, stopped or not; returns when it is gone."""
        ...

    def end(self) -> str:
        """How it ended, in words."""
        ...
