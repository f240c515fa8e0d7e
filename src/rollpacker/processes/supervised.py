"""Supervised processes that run a user's code: started, read, ended if they hang, replaced.

A pool belongs to one event loop, or to a caller that waits. Subclasses of ``SupervisedPool`` define
the work, its time limits, and the attempt that a death is charged to.
"""

from __future__ import annotations

import select
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from rollpacker.processes.children import Child, kill_child
from rollpacker.processes.frames import Channel

if TYPE_CHECKING:
    import asyncio

CHECK_S = 0.25
_MOST_SAID = 100
"""The most log lines that are kept until the caller fetches them."""
_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0
_APART_S = 60.0
"""Seconds after which two deaths are unrelated."""


@dataclass(slots=True, eq=False)
class SupervisedProcess(ABC):
    """One process of a pool."""

    popen: Child
    channel: Channel
    started: float
    ready: bool = False

    @property
    @abstractmethod
    def busy(self) -> bool:
        """Whether it holds work. Its loss is charged to that work."""

    def hear(self, take: Callable[[bytes], object]) -> str | None:
        """As ``Channel.hear``, but a dead process counts as gone."""
        # A child of the process may hold the other end open, so also ask for its exit code.
        dead = self.popen.poll() is not None
        gone = self.channel.hear(take)
        return "" if gone is None and dead else gone

    def kill(self) -> str:
        self.channel.close()
        return kill_child(self.popen)


M = TypeVar("M", bound=SupervisedProcess)


class SupervisedPool(ABC, Generic[M]):
    """Processes of one kind.

    If a process ends with work, the loss is charged to the work, and the process is replaced at
    once. If it had no work, the next starts wait longer and longer, as the machine may lack
    something.

    Args:
        name: of the processes in messages, after their configuration key.
        most_starts: failed starts in a row after which the pool gives up.
        check_s: seconds between two checks for hanging processes.
    """

    def __init__(self, name: str, most_starts: int, check_s: float = CHECK_S) -> None:
        self.broken: str | None = None
        """Why the pool has given up."""
        self._name = name
        self._most_starts = most_starts
        self._check_s = check_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._checking: asyncio.TimerHandle | None = None
        self._members: list[M] = []
        self._said: list[str] = []
        self._failed_starts = 0
        self._refused: str | None = None
        """The error of the user's code while it was loaded."""
        self._in_vain = 0
        self._last_in_vain = -_APART_S
        self._not_before = 0.0

    # What the pools are --------------------------------------------------------------------------

    @abstractmethod
    def _new(self) -> M:
        """Start a process."""

    @abstractmethod
    def _missing(self) -> int:
        """The number of processes to start now."""

    @abstractmethod
    def _heard(self, member: M, data: bytes) -> None:
        """Take a frame. An exception is the process's fault, and ends it."""

    @abstractmethod
    def _late(self, member: M, now: float) -> str | None:
        """Why the process must be ended for its slowness at ``now`` (monotonic seconds)."""

    @abstractmethod
    def _lost(self, member: M, why: str, ended: str) -> None:
        """Report lost work. ``why`` it was ended is empty if it went by itself. ``ended``: how."""

    @abstractmethod
    def _working(self) -> bool:
        """Whether work waits, so that processes must be checked."""

    @abstractmethod
    def _go_on(self) -> None:
        """Hand out waiting work and pass on results, after an event."""

    # What the driver calls -----------------------------------------------------------------------

    def wait_ready(self) -> None:
        """Wait until every process has loaded the user's code. Raises ``ValueError``."""
        while self.broken is None and (
            self._missing() or not all(member.ready for member in self._members)
        ):
            self._pump(CHECK_S)
        if self.broken is not None:
            raise ValueError(self.broken)

    def said(self) -> list[str]:
        """New log lines: mended faults and warnings."""
        said, self._said = self._said, []
        return said

    def close(self) -> None:
        if self._checking is not None:
            self._checking.cancel()
        for member in self._members:
            self._unlisten(member)
            member.kill()
        self._members = []

    # Processes -----------------------------------------------------------------------------------

    def _fill(self) -> None:
        if self.broken is None:
            self._start(self._missing())

    def _start(self, count: int) -> list[M]:
        """Start ``count`` processes, or none yet if the last ones died without work."""
        if count > 0 and time.monotonic() < self._not_before:
            self._check_later()
            return []
        started = [self._new() for _ in range(count)]
        for member in started:
            self._members.append(member)
            self._listen(member)
        return started

    def _is_ready(self, member: M) -> None:
        member.ready = True
        self._failed_starts = 0

    def _retire(self, member: M) -> str:
        self._members.remove(member)
        self._unlisten(member)
        return member.kill()

    def _read(self, member: M) -> None:
        gone = member.hear(lambda data: self._heard(member, data))
        if gone is not None and member in self._members:
            self._replace(member, gone)

    def _replace(self, member: M, why: str) -> None:
        """A process is gone or must be ended (``why``). Report lost work, and start another."""
        ended = self._retire(member)
        if not (member.ready and member.busy):
            self._ended_in_vain(time.monotonic())
        if not member.ready:
            self._failed_starts += 1
            if self._failed_starts >= self._most_starts and self.broken is None:
                last = self._refused or f"the last {why or ended}"
                self.broken = f"{self._name} do not start: {last}"
        self._lost(member, why, ended)
        self._fill()

    def _ended_in_vain(self, now: float) -> None:
        row = now - self._last_in_vain < _APART_S
        self._in_vain = self._in_vain + 1 if row else 0
        self._last_in_vain = now
        # No pause after the first one. The exponent stays within a float's range.
        pause = _PAUSE_S * 2.0 ** min(self._in_vain, 20) if self._in_vain else 0.0
        self._not_before = now + min(pause, _LONGEST_PAUSE_S)

    def _check(self) -> None:
        for member in tuple(self._members):
            # Read first: if the driver itself was busy, an arrived answer is not a hang.
            self._read(member)
            if member not in self._members:
                continue
            late = self._late(member, time.monotonic())
            if late is not None:
                self._replace(member, late)
        self._fill()

    def _say(self, line: str) -> None:
        if len(self._said) < _MOST_SAID:
            self._said.append(line)

    def _write(self, member: M, frames: Sequence[bytes]) -> None:
        member.channel.send(b"".join(frames))
        self._flush_later(member)

    def _pump(self, timeout: float) -> None:
        channels = [member.channel for member in self._members]
        writing = [channel for channel in channels if channel.unsent]
        select.select(channels, writing, [], timeout)
        for channel in writing:
            channel.flush()
        self._check()
        self._go_on()

    # The event loop ------------------------------------------------------------------------------

    def _listen(self, member: M) -> None:
        self._flush_later(member)

    def _unlisten(self, member: M) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(member.channel)
            self._loop.remove_writer(member.channel)

    def _flush_later(self, member: M) -> None:
        if self._loop is not None and member.channel.unsent:
            self._loop.add_writer(member.channel, self._on_writable, member)

    def _on_writable(self, member: M) -> None:
        assert self._loop is not None
        if member.channel.flush():
            self._loop.remove_writer(member.channel)

    def _check_later(self) -> None:
        if self._loop is not None and self._checking is None:
            self._checking = self._loop.call_later(self._check_s, self._on_check)

    def _on_check(self) -> None:
        self._checking = None
        # First, so that another check follows even if this one raises.
        if self._working():
            self._check_later()
        self._check()
        self._go_on()
