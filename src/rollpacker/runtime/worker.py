"""How a worker, whatever its role, serves its driver: commands first, then its own work."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Event, Lock, Thread
from typing import Any, Protocol

from rollpacker.config import RunConfig
from rollpacker.runtime import messages as msg
from rollpacker.runtime.channel import Channel

Send = Callable[[msg.Report], None]
"""Takes a report to the driver."""
Commands = Mapping[type, Callable[[Any], None]]
"""What to do for each kind of command."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """How to build a worker.

    Args:
        config: the run's.
        rank: 0 to world - 1.
        cores: CPU cores to stay on; empty for any.
        device: ``cpu`` or ``cuda:N``.
        max_length: longest response in tokens.
        total_updates: updates of the whole run.
        member: its place among the workers that share a replica, of which there are
        members: in all, and which meet at the file
        meeting: once.
    """

    config: RunConfig
    rank: int
    cores: tuple[int, ...]
    device: str
    max_length: int
    total_updates: int
    member: int = 0
    members: int = 1
    meeting: str = ""


class Role(Protocol):
    """What a worker is: an engine, a replica, or both."""

    commands: Commands

    @property
    def progress(self) -> int:
        """Pieces of work done so far."""
        ...

    def busy(self) -> bool:
        """Whether there is work between commands."""
        ...

    def work(self) -> None:
        """Do a piece of it, as short as may be: commands wait meanwhile."""
        ...


class Server:
    """Serves a driver: its commands first, then the role's own work.

    Args:
        channel: to the driver.
        heartbeat_s: seconds between two signs of life.
    """

    def __init__(self, channel: Channel, heartbeat_s: float) -> None:
        self._channel = channel
        self._heartbeat_s = heartbeat_s
        self._inbox: SimpleQueue[msg.Command | None] = SimpleQueue()
        self._sending = Lock()
        self._stopped = Event()
        # Always reading: two processes that both write into full pipes would wait for ever.
        Thread(target=self._listen, name="inbox", daemon=True).start()

    def serve(self, build: Callable[[Send], Role]) -> None:
        """Until told to stop. Raises ``EOFError`` or ``OSError`` when the driver is gone."""
        role = build(self.send)
        Thread(target=self._beat, args=(role,), name="heartbeat", daemon=True).start()
        gc.collect()
        gc.freeze()  # collections must not walk the libraries' objects again and again
        try:
            while True:
                if role.busy() and self._inbox.empty():
                    role.work()
                    continue
                command = self._inbox.get()
                if command is None:
                    raise EOFError
                if isinstance(command, msg.Stop):
                    return
                role.commands[type(command)](command)
        finally:
            self._stopped.set()

    def _listen(self) -> None:
        try:
            while True:
                self._inbox.put(self._channel.recv())
        except (EOFError, OSError):
            self._inbox.put(None)

    def send(self, report: msg.Report) -> None:
        """Tell the driver. Raises ``OSError`` when it is gone."""
        with self._sending:
            self._channel.send(report)

    def _beat(self, role: Role) -> None:
        try:
            while not self._stopped.wait(self._heartbeat_s):
                self.send(msg.Beat(progress=role.progress))
        except OSError:
            return  # the driver is gone; whoever serves it sees that too
