"""The run's clock: seconds of training, continued over resumes."""

from __future__ import annotations

import time


class Clock:
    """Monotonic seconds since the run began; ``offset`` is what earlier processes spent."""

    def __init__(self, offset: float = 0.0) -> None:
        self._zero = time.monotonic() - offset

    def __call__(self) -> float:
        """Now."""
        return time.monotonic() - self._zero

    def at(self, monotonic: float) -> float:
        """A time of the monotonic clock, which all processes share, as the run's."""
        return monotonic - self._zero
