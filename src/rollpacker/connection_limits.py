"""Who may keep a connection to a server: strangers few and never for long, callers that have shown
a credential in places of their own.

A server does not ask whether there is room: each that comes gets a place, and one that is idle
makes way for it. So neither silent strangers nor one caller with many connections keep others out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field


@dataclass(eq=False, slots=True)
class ConnectionPlace:
    """Of a connection: ``who`` has shown a credential, None is a stranger; a ``busy`` one is being
    answered."""

    close: Callable[[], None] = field(repr=False)
    who: Hashable | None = None
    busy: bool = False


class Places:
    """The places of a server: for so many ``strangers`` together, so many connections of all
    ``known`` callers together, and so many of ``each`` caller."""

    def __init__(self, *, strangers: int, known: int, each: int) -> None:
        self._most_strangers = strangers
        self._most_known = known
        self._most_each = each
        self._strangers: dict[ConnectionPlace, None] = {}
        self._known: dict[ConnectionPlace, None] = {}
        self._count: Counter[Hashable] = Counter()

    def __len__(self) -> int:
        return len(self._strangers) + len(self._known)

    def take(self, close: Callable[[], None]) -> ConnectionPlace:
        """A stranger has come; the one that has been there longest makes way where need be."""
        place = ConnectionPlace(close)
        if len(self._strangers) >= self._most_strangers:
            self._end(next(iter(self._strangers)))
        self._strangers[place] = None
        return place

    def know(self, place: ConnectionPlace, who: Hashable) -> None:
        """The connection has authenticated as ``who``. Where that caller's limit or that of all is
        reached, one connection is closed: an idle one of the caller with the most, else that
        caller's oldest; where that caller is ``who``, this one."""
        if place.who == who or not (place in self._strangers or place in self._known):
            return
        self.leave(place)
        crowded = who if self._count[who] >= self._most_each else None
        if crowded is None and len(self._known) >= self._most_known:
            ((crowded, _),) = self._count.most_common(1)
        theirs = [] if crowded is None else [each for each in self._known if each.who == crowded]
        place.who = who
        self._known[place] = None
        self._count[who] += 1
        if crowded is None:
            return
        # The one that has been idle longest.
        closed = next((each for each in theirs if not each.busy), None)
        if closed is None and self._count[who] < self._count[crowded]:
            closed = theirs[0]
        self._end(closed or place)

    def answering(self, place: ConnectionPlace, busy: bool) -> None:
        """A request is being answered there, or no longer: the last to end is the last to go."""
        place.busy = busy
        if not busy and place in self._known:
            self._known[place] = self._known.pop(place)

    def leave(self, place: ConnectionPlace) -> None:
        self._strangers.pop(place, None)
        if place in self._known:
            del self._known[place]
            self._count[place.who] -= 1
            if not self._count[place.who]:
                del self._count[place.who]

    def dismiss(self, who: Hashable) -> None:
        """A credential is no longer good for anything: close what was opened with it."""
        for place in [each for each in self._known if each.who == who]:
            self._end(place)

    def close(self) -> None:
        for place in (*self._strangers, *self._known):
            self._end(place)

    def _end(self, place: ConnectionPlace) -> None:
        self.leave(place)
        place.close()
