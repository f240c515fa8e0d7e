"""Forecasts made beside the work: with hundreds of jobs that wait one takes seconds.

A copy of the scheduler is run ahead in a thread of its own; whoever asks gets the middle of the
last runs, which follow each other by a minute at least.
"""

from __future__ import annotations

import time
from collections import deque
from copy import deepcopy
from dataclasses import dataclass, field
from threading import Thread

from rollpacker.rollmux.forecast import RUNS, forecast, middle
from rollpacker.rollmux.scheduler import Scheduler

_FRESH_S = 60.0
"""Seconds for which a forecast is taken to be right."""
_SHARE = 10.0
"""So many times what a forecast took passes before the next one."""
_LOOKS = 60


@dataclass(slots=True)
class _Look:
    """One run ahead from ``now``; ``found`` None until it is over."""

    scheduler: Scheduler
    now: float
    number: int
    took_s: float = 0.0
    found: dict[str, float] | None = field(default=None)

    def run(self) -> None:
        began, found = time.monotonic(), dict[str, float]()
        try:
            found = forecast(self.scheduler, self.now, _LOOKS, self.number)
        finally:
            # Also where it failed: the next one is made in its time.
            self.took_s = time.monotonic() - began
            self.found = found


class Lookout:
    """Is asked by one thread only."""

    patience_s = 0.2
    """Seconds that somebody who asks waits for a new forecast; a short queue's is there by then."""

    def __init__(self) -> None:
        self._running: _Look | None = None
        self._runs: deque[tuple[float, dict[str, float]]] = deque(maxlen=RUNS)
        """When they were made, and what they found."""
        self._number = 0
        self._next = float("-inf")

    def look(self, scheduler: Scheduler, now: float) -> dict[str, float]:
        """Seconds until jobs that wait are expected to start, those left out that nobody knows."""
        if self._running is None and now >= self._next:
            self._running = _Look(deepcopy(scheduler), now, self._number)
            self._number += 1
            thread = Thread(target=self._running.run, name="mux-lookout", daemon=True)
            thread.start()
            thread.join(self.patience_s)
        done = self._running
        if done is not None and done.found is not None:
            self._runs.append((done.now, done.found))
            self._next = now + max(_FRESH_S, _SHARE * done.took_s)
            self._running = None
        return middle(
            [
                {job: max(wait - (now - at), 0.0) for job, wait in found.items()}
                for at, found in self._runs
            ]
        )
