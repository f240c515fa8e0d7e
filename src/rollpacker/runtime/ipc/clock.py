"""The run's clock: seconds of training, continued over resumes."""

from __future__ import annotations

import time


class Clock:
    """Monotonic seconds since the run began. ``offset``: seconds of earlier processes. ``rate``:
    seconds of the run in a real second, more than 1 on emulated devices."""

    def __init__(self, offset: float = 0.0, rate: float = 1.0) -> None:
        self._rate = rate
        self._zero = time.monotonic() - offset / rate

    def __call__(self) -> float:
        return (time.monotonic() - self._zero) * self._rate

    def at(self, monotonic: float) -> float:
        """Convert a time of the monotonic clock, which all processes share."""
        return (monotonic - self._zero) * self._rate
