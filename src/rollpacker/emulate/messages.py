"""What an emulated worker and its driver say besides what all workers say."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from rollpacker.runtime.messages import messages as msg
from rollpacker.sim.world.agenda import Agenda

_BINS = 4
"""Of lateness, for each doubling."""
_LEAST_S = 1e-6


@dataclass
class Lateness:
    """How late actions ran, wall seconds: a histogram."""

    counts: Counter[int] = field(default_factory=Counter[int])
    longest_s: float = 0.0

    def add(self, seconds: float) -> None:
        self.counts[max(0, math.ceil(_BINS * math.log2(max(seconds, _LEAST_S) / _LEAST_S)))] += 1
        self.longest_s = max(self.longest_s, seconds)

    def __add__(self, other: Lateness) -> Lateness:
        return Lateness(self.counts + other.counts, max(self.longest_s, other.longest_s))

    def quantile(self, share: float) -> float:
        """Seconds that so much of the actions were late at most, to the next fifth; 0 of none."""
        left = share * self.counts.total()
        for place in sorted(self.counts):
            left -= self.counts[place]
            if left <= 0.0:
                return min(self.longest_s, _LEAST_S * 2.0 ** (place / _BINS))
        return self.longest_s


class WallAgenda(Agenda):
    """Runs actions when they are due, in emulated seconds.

    ``now`` is the time for which the running action was planned, however late it runs, so lateness
    does not add up.

    Args:
        factor: emulated seconds in one of the clock's.
    """

    def __init__(self, factor: float, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._factor = factor
        self._clock = clock
        self._zero = clock()
        self.lateness = Lateness()

    def of(self, clock_s: float) -> float:
        """Emulated time of a time of the clock."""
        return (clock_s - self._zero) * self._factor

    def clock_s(self, at: float) -> float:
        """Time of the clock at an emulated time."""
        return self._zero + at / self._factor

    def wait_s(self) -> float:
        """Seconds of the clock until the next action is due: 0 where it is, infinite without."""
        if self.next_at is None:
            return math.inf
        return max(0.0, self.clock_s(self.next_at) - self._clock())

    def run_due(self) -> bool:
        if self.next_at is None:
            return False
        late = self._clock() - self.clock_s(self.next_at)
        if late < 0.0:
            return False
        self.lateness.add(late)
        return self.run_next()


class Draw(NamedTuple):
    """Which prompt of the workload a prompt stands for: the number of its draw, the steps that have
    sampled it before, and its task domain."""

    number: int
    visits: int
    domain: str


class Forced(msg.Submit, frozen=True, kw_only=True):
    """Sample these, with the lengths of the prompts that they stand for."""

    draws: tuple[Draw, ...]


class Punctual(msg.Beat, frozen=True, kw_only=True):
    """A sign of life with how late actions of this process ran, since it began.

    ``process`` is the number of its first worker.
    """

    process: int
    lateness: Lateness
