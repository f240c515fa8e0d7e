"""Finds workers and nodes that are silent or hang."""

from __future__ import annotations

from collections.abc import Collection
from math import ceil

LOOKS = 2
"""Checks in each heartbeat."""
_MISSED = 4
"""Missed checks in a row until a worker counts as dead: two to two and a half heartbeats."""
_STARTING_S = 180.0
"""The least patience in seconds: loading libraries blocks threads, and compilers take long."""
_TIMES = 10.0
"""A piece of work may take so many times as long as the longest one before."""
_FIRST_S = 1800.0
"""The patience in seconds with a first piece of work, such as a large checkpoint."""


class Silence:
    """Counts checks without a sign of life, or with the same work. It counts no seconds: after a
    suspension of the driver, its workers must not look dead."""

    def __init__(self, heartbeat_s: float) -> None:
        self.every_s = heartbeat_s / LOOKS
        self._starting = max(_MISSED, ceil(_STARTING_S / self.every_s))
        self._heard: set[int] = set()
        self._missed: dict[int, int] = {}
        self._at: dict[int, tuple[str, int, float]] = {}
        self._same: dict[int, int] = {}

    def begin(self, who: int) -> None:
        self._missed.pop(who, None)
        self._at.pop(who, None)

    def sign(self, who: int) -> None:
        self._heard.add(who)

    def work(self, who: int, at: str, done: int, longest_s: float | None) -> None:
        """Note a worker's current work ``at`` (empty: it waits), its number of ended pieces, and
        the longest such piece's seconds."""
        if (at, done) != self._at.get(who, ("", 0, 0.0))[:2]:
            self._same[who] = 0
        patience = _FIRST_S if longest_s is None else max(_STARTING_S, _TIMES * longest_s)
        self._at[who] = at, done, patience

    def look(self, live: Collection[int], starting: Collection[int] = ()) -> dict[int, str]:
        """Return those of ``live`` that count as dead, and why. ``starting`` ones get more time."""
        lost: dict[int, str] = {}
        for who in live:
            self._missed[who] = 0 if who in self._heard else self._missed.get(who, 0) + 1
            self._same[who] = self._same.get(who, 0) + 1
            at, _, patience = self._at.get(who, ("", 0, 0.0))
            if at and self._same[who] * self.every_s >= patience:
                lost[who] = f"it hangs: {at} has not ended for {self._same[who] * self.every_s:g} s"
            if self._missed[who] >= (self._starting if who in starting else _MISSED):
                lost[who] = "it gave no sign of life"
        self._heard.clear()
        return lost
