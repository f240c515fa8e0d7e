"""A heap of timed actions: the simulator's only notion of time."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush

Action = Callable[[], None]


class Agenda:
    """Runs actions in order of time. Actions of one time run first in, first out."""

    def __init__(self) -> None:
        self.now = 0.0  # seconds since the simulation began
        self._heap: list[tuple[float, int, Action]] = []
        self._count = 0

    def at(self, time: float, action: Action) -> None:
        """Run ``action`` at ``time``, or now if that time has passed."""
        self._count += 1
        heappush(self._heap, (time if time > self.now else self.now, self._count, action))

    def after(self, seconds: float, action: Action) -> None:
        self.at(self.now + seconds, action)

    @property
    def next_at(self) -> float | None:
        return self._heap[0][0] if self._heap else None

    def run_next(self) -> bool:
        if not self._heap:
            return False
        self.now, _, action = heappop(self._heap)
        action()
        return True
