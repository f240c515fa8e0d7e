"""The pump: events go into a policy, and its decisions are recorded and performed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from rollpacker.core.decisions import Decision
from rollpacker.core.events import Event
from rollpacker.core.journal import Policy

Record = Callable[[float, Event, Sequence[Decision]], None]
"""Takes an event's time, the event and its decisions, as a journal's ``record`` does."""


class Pump:
    """Feeds events to a policy in first-in first-out order and performs its decisions. ``perform``:
    starts the decisions of one event without waiting. It may post events."""

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
        """Take events. Returns when the inbox is empty, or at once within another ``post``."""
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
