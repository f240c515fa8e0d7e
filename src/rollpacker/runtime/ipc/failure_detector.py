"""Who has stopped to give signs of life, or gives them and comes to nothing."""

from __future__ import annotations

from collections.abc import Collection
from math import ceil

LOOKS = 2
"""In each heartbeat."""
_MISSED = 4
"""Looks in a row without a sign of life from one that is taken for dead: it has been silent for
more than two heartbeats and at most two and a half."""
_STARTING_S = 180.0
"""That one may be silent, at the least, before it has begun: libraries that are loaded let nobody
else do anything. It may also work so long at one thing: a compiler may be at work."""
_TIMES = 10.0
"""So many times as long as it ever has may it work at one thing."""
_FIRST_S = 1800.0
"""It may work so long at a kind of thing that it has never done: large checkpoints, the first
gradients."""


class Silence:
    """Counts how often somebody looked and there was no sign of life, or the same work at hand.

    It counts looks, not seconds: when the driver itself was suspended, its workers must not look
    dead.
    """

    def __init__(self, heartbeat_s: float) -> None:
        self.every_s = heartbeat_s / LOOKS
        """Between two looks."""
        self._starting = max(_MISSED, ceil(_STARTING_S / self.every_s))
        self._heard: set[int] = set()
        self._missed: dict[int, int] = {}
        self._at: dict[int, tuple[str, int, float]] = {}
        self._same: dict[int, int] = {}

    def begin(self, who: int) -> None:
        """It is another one than before."""
        self._missed.pop(who, None)
        self._at.pop(who, None)

    def sign(self, who: int) -> None:
        self._heard.add(who)

    def work(self, who: int, at: str, done: int, longest_s: float | None) -> None:
        """It says what it is at, in words, empty while it waits to be told; how many pieces of work
        it has ended; and how long such a piece has taken at the most, None where it has done none.
        """
        if (at, done) != self._at.get(who, ("", 0, 0.0))[:2]:
            self._same[who] = 0
        patience = _FIRST_S if longest_s is None else max(_STARTING_S, _TIMES * longest_s)
        self._at[who] = at, done, patience

    def look(self, live: Collection[int], starting: Collection[int] = ()) -> dict[int, str]:
        """Those of ``live`` that are taken for dead, and why; more patient with ``starting``."""
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
