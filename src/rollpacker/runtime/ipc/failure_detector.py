"""Who has stopped to give signs of life."""

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
else do anything."""


class Silence:
    """Counts how often somebody looked and there was no sign of life.

    That and not time, which stands still for neither a driver nor those that it waits for.

    Args:
        heartbeat_s: seconds between two signs of life.
    """

    def __init__(self, heartbeat_s: float) -> None:
        self.every_s = heartbeat_s / LOOKS
        """Between two looks."""
        self._starting = max(_MISSED, ceil(_STARTING_S / self.every_s))
        self._heard: set[int] = set()
        self._missed: dict[int, int] = {}

    def begin(self, who: int) -> None:
        """It is another one than before."""
        self._missed.pop(who, None)

    def sign(self, who: int) -> None:
        """A sign of life."""
        self._heard.add(who)

    def look(self, live: Collection[int], starting: Collection[int] = ()) -> list[int]:
        """Those of ``live`` that are taken for dead; more patient with ``starting``."""
        for who in live:
            self._missed[who] = 0 if who in self._heard else self._missed.get(who, 0) + 1
        self._heard.clear()
        return [who for who in live if self._missed[who] >= self._patience(who in starting)]

    def _patience(self, starting: bool) -> int:
        return self._starting if starting else _MISSED
