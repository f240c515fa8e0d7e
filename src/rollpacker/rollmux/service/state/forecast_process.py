"""A process that runs the scheduler ahead, so that no heartbeat waits for it.

It gets the scheduler's state as JSON, which is much faster than a copy (milliseconds against 100
ms), and answers with the starts of waiting jobs.
"""

from __future__ import annotations

import os
import weakref
from multiprocessing.connection import Connection

from rollpacker.core.codec import dumps, dumps_finite, load, loads
from rollpacker.processes.children import die_with, kill_child, start_child
from rollpacker.rollmux.model.settings import Settings
from rollpacker.rollmux.scheduler.scheduler import Scheduler
from rollpacker.rollmux.scheduler.snapshot import SchedulerSnapshot
from rollpacker.rollmux.simulation.arrivals import lately
from rollpacker.rollmux.simulation.forecast import forecast

_NICE = 10  # lower priority than the daemon and other processes


def asked(scheduler: Scheduler, now: float, number: int) -> bytes:
    """A request for ``ForecastProcess.run``: the scheduler's state and the run's number."""
    return dumps_finite((now, number, scheduler.snapshot()))


class ForecastProcess:
    """The process. It ends with the thread that makes it."""

    def __init__(self, settings: Settings) -> None:
        popen, end = start_child(__name__)
        # Also without ``close``, since an ended process must be waited for.
        self._kill = weakref.finalize(self, kill_child, popen)
        self._end = Connection(end.detach())
        self._settings: bytes | None = dumps(settings)

    def run(self, request: bytes) -> dict[str, float]:
        """Run ``forecast`` for a request and wait for it.

        Raises ``EOFError`` or ``OSError`` if the process has ended.
        """
        if self._settings is not None:
            self._end.send_bytes(self._settings)
            self._settings = None
        self._end.send_bytes(request)
        return load(loads(self._end.recv_bytes()), dict[str, float])

    def close(self) -> None:
        self._kill()


def main(descriptor: int, parent: int) -> None:
    """Answer requests until the daemon is gone."""
    die_with(parent)
    os.nice(_NICE)
    with Connection(descriptor) as daemon:
        try:
            settings = load(loads(daemon.recv_bytes()), Settings)
            while True:
                daemon.send_bytes(dumps(_starts(settings, daemon.recv_bytes())))
        except (EOFError, OSError):
            return


def _starts(settings: Settings, request: bytes) -> dict[str, float]:
    now, number, state = load(loads(request), tuple[float, int, SchedulerSnapshot])
    scheduler = Scheduler(settings)
    scheduler.restore(state)
    return forecast(scheduler, now, number=number, arrivals=lately(scheduler.cluster, now))
