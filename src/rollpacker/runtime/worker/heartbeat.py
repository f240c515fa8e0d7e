"""Reports of a process, with signs of life between them."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event, Lock, Thread
from typing import Any

from rollpacker.runtime.ipc.link import WorkerChannel
from rollpacker.runtime.messages import messages as msg


class Heartbeat:
    """Sends what a process has to say, and from a thread of its own a ``Beat`` now and then.

    Args:
        channel: to the driver.
        heartbeat_s: seconds between two signs of life.
        beat: makes them.
    """

    def __init__(
        self, channel: WorkerChannel, heartbeat_s: float, beat: Callable[[], Any] = msg.Beat
    ) -> None:
        self._channel = channel
        self._make = beat
        self._heartbeat_s = heartbeat_s
        self._sending = Lock()
        self.stopped = Event()
        """Set it where there is no more to say."""
        Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def send(self, report: Any) -> None:
        """Tell the driver. Raises ``OSError`` when it is gone."""
        with self._sending:
            self._channel.send(report)

    def _beat(self) -> None:
        try:
            while not self.stopped.wait(self._heartbeat_s):
                self.send(self._make())
        except OSError:
            return  # the driver is gone; whoever serves it sees that too
