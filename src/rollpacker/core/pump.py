"""The pump: events into a policy, its decisions out, every line of it on record."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from rollpacker.core.decisions import Decision
from rollpacker.core.events import Event
from rollpacker.core.journal import Policy

Record = Callable[[float, Event, Sequence[Decision]], None]
"""Takes the time of an event, the event, and what it led to; a journal's ``record`` is one."""
_SLICE = 1024
"""Decisions performed before others have their turn: some ms."""


class Pump:
    """Feeds events to a policy in first-in first-out order and performs what it decides.

    Args:
        policy: decides.
        perform: starts what one event led to and never waits; may post events itself. What very
            many decisions start may come in parts.
        clock: seconds; the run's own, or simulated.
        record: where every event goes; None for nowhere.
        flush: what comes after all that is known has been performed; may post events too.
        later: calls back when others have had their turn: of very many decisions, those that start
            a large step for one, the rest are performed then. None: there are no others.
    """

    def __init__(
        self,
        policy: Policy,
        perform: Callable[[Sequence[Decision]], None],
        clock: Callable[[], float],
        record: Record | None = None,
        flush: Callable[[], None] | None = None,
        later: Callable[[Callable[[], None]], None] | None = None,
    ) -> None:
        self._policy, self._perform, self._clock = policy, perform, clock
        self._record, self._flush, self._later = record, flush, later
        self._inbox: deque[Event] = deque()
        self._made: deque[Sequence[Decision]] = deque()
        self._pumping = False

    def post(self, *events: Event) -> None:
        """Something happened. Returns when the inbox is empty, unless it is being pumped, or the
        rest comes later."""
        self._inbox.extend(events)
        if not self._pumping:
            self._run()

    def hurry(self) -> None:
        """Decide and perform now what was left for later."""
        while self._made or self._inbox:
            self._one()

    def clear(self) -> None:
        """Forget what is left for later: nobody wants it any more."""
        self._inbox.clear()
        self._made.clear()
        self._pumping = False

    def _run(self) -> None:
        """Until nothing is left, or there is so much that others have their turn first."""
        self._pumping, paused = True, False
        try:
            while self._made or self._inbox:
                self._one()
                if self._made and self._later is not None:
                    paused = True
                    self._later(self._run)
                    return
                if self._flush is not None and not self._inbox and not self._made:
                    self._flush()
        finally:
            self._pumping = paused

    def _one(self) -> None:
        """Decide on an event, unless decisions are left, and perform the first part of them."""
        if not self._made:
            now, event = self._clock(), self._inbox.popleft()
            made = list(self._policy.handle(now, event))
            if self._record is not None:
                self._record(now, event, made)
            most = _SLICE if self._later is not None else len(made) or 1
            self._made.extend(made[at : at + most] for at in range(0, len(made), most))
        if self._made:
            self._perform(self._made.popleft())
