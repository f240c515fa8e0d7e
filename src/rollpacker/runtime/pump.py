"""The pump: events into a policy, its decisions out, every line of it in the journal."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

from rollpacker.core.decisions import Decision
from rollpacker.core.events import Event
from rollpacker.core.journal import AnyPolicy, JournalWriter


class Pump:
    """Feeds events to a policy in first-in first-out order and performs what it decides.

    Args:
        policy: decides.
        perform: starts what one event led to and never waits; may post events itself.
        journal: where every event is recorded.
        clock: seconds; the run's own.
    """

    def __init__(
        self,
        policy: AnyPolicy,
        perform: Callable[[Sequence[Decision]], None],
        journal: JournalWriter,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._policy = policy
        self._perform = perform
        self._journal = journal
        self._clock = clock
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
                self._pump_one(self._inbox.popleft())
        finally:
            self._pumping = False

    def _pump_one(self, event: Event) -> None:
        now = self._clock()
        decisions = list(self._policy.handle(now, event))
        self._journal.record(now, event, decisions)
        self._perform(decisions)
