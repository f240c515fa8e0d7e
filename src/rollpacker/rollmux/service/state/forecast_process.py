"""A process that runs the scheduler ahead, so that no heartbeat waits for it.

It is told the scheduler's state as JSON, which is written in some milliseconds where a copy takes a
hundred, and answers with when each job that waits starts.
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

_NICE = 10
"""Below the daemon and what else is on its machine."""


def asked(scheduler: Scheduler, now: float, number: int) -> bytes:
    """What ``ForecastProcess.run`` takes: the scheduler as it is now, and the run's number."""
    return dumps_finite((now, number, scheduler.snapshot()))


class ForecastProcess:
    """The process; begun by the thread that makes this, with which it ends.

    Args:
        settings: of the scheduler.
    """

    def __init__(self, settings: Settings) -> None:
        popen, end = start_child(__name__)
        # Also where nobody closes it: a process that has ended is to be waited for.
        self._kill = weakref.finalize(self, kill_child, popen)
        self._end = Connection(end.detach())
        self._settings: bytes | None = dumps(settings)

    def run(self, request: bytes) -> dict[str, float]:
        """``forecast`` of a request; waits for it, in a thread that has the time.

        Raises ``EOFError`` or ``OSError`` where the process has ended.
        """
        if self._settings is not None:
            self._end.send_bytes(self._settings)
            self._settings = None
        self._end.send_bytes(request)
        return load(loads(self._end.recv_bytes()), dict[str, float])

    def close(self) -> None:
        """End it; whoever waits for an answer gets none."""
        self._kill()


def main(descriptor: int, parent: int) -> None:
    """Answer what comes in until the daemon is gone."""
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
