"""The pump: events into a policy, its decisions out, every line of it on record."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from rollpacker.core.decisions import Decision
from rollpacker.core.events import Event
from rollpacker.core.journal import Policy

Record = Callable[[float, Event, Sequence[Decision]], None]
"""Takes the time of an event, the event, and what it led to; a journal's ``record`` is one."""


class Pump:
    """Feeds events to a policy in first-in first-out order and performs what it decides.

    Args:
        policy: decides.
        perform: starts what one event led to and never waits; may post events itself.
        clock: seconds; the run's own, or simulated.
        record: where every event goes; None for nowhere.
    """

    def __init__(
        self,
        policy: Policy,
        perform: Callable[[Sequence[Decision]], None],
        clock: Callable[[], float],
        record: Record | None = None,
    ) -> None:
        self._policy, self._perform, self._clock = policy, perform, clock
        self._record = record
        self._inbox: deque[Event] = deque()
        self._pumping = False

    def post(self, *events: Event) -> None:
        """Something happened. Returns when the inbox is empty, unless it is being pumped."""
        self._inbox.extend(events)
        if self._pumping:
            return
        self._pumping = True
        try:
            while self._inbox:
                now, event = self._clock(), self._inbox.popleft()
                made = list(self._policy.handle(now, event))
                if self._record is not None:
                    self._record(now, event, made)
                if made:
                    self._perform(made)
        finally:
            self._pumping = False
