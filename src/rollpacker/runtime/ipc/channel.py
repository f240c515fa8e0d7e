"""How a driver and a worker talk, whatever lies between them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol


class WorkerChannel(Protocol):
    """A worker's end: whole messages, in order, none lost while both ends live (``Wire``)."""

    def send(self, obj: Any, /) -> None:
        """Send a message. Raises ``OSError`` when the other end is gone."""
        ...

    def recv(self) -> Any:
        """Wait for the next message. Raises ``EOFError`` or ``OSError`` when the other end is
        gone."""
        ...

    def close(self) -> None:
        """Say no more; the other end will see it."""
        ...


class DriverChannel(Protocol):
    """The driver's end, which never waits (``Link``)."""

    def open(
        self,
        loop: asyncio.AbstractEventLoop,
        hear: Callable[[Any], None],
        gone: Callable[[], None],
        sign: Callable[[], None] = ...,
    ) -> None:
        """Begin to listen: ``hear`` takes each message, ``gone`` is told once that the other end is
        gone, ``sign`` that something came."""
        ...

    def send(self, message: Any) -> None:
        """Send a message, now or when the other end takes it."""
        ...

    def send_encoded(self, data: memoryview) -> None:
        """The same, of a message that goes to several (``encode``)."""
        ...

    def close(self) -> None:
        """Say and hear no more; the other end sees it."""
        ...


class Host(Protocol):
    """What a worker runs in, from the driver's side."""

    @property
    def link(self) -> DriverChannel:
        """To the worker."""
        ...

    @property
    def pid(self) -> int:
        """Its process, on whatever node that is; 0 when it is not known."""
        ...

    def wait(self, seconds: float) -> None:
        """Give it so long to end."""
        ...

    def kill(self) -> None:
        """End it, stopped or not; its link sees it, and nobody waits for it."""
        ...

    async def end(self, seconds: float = 5.0) -> str:
        """How it ended, in words; it has so many seconds for that."""
        ...
