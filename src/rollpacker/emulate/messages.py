"""Messages of emulated workers and their driver, besides those of all workers."""

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
"""Bins for each doubling of lateness."""
_LEAST_S = 1e-6


@dataclass
class Lateness:
    """A histogram of lateness of actions, in wall seconds."""

    counts: Counter[int] = field(default_factory=Counter[int])
    longest_s: float = 0.0

    def add(self, seconds: float) -> None:
        self.counts[max(0, math.ceil(_BINS * math.log2(max(seconds, _LEAST_S) / _LEAST_S)))] += 1
        self.longest_s = max(self.longest_s, seconds)

    def __add__(self, other: Lateness) -> Lateness:
        return Lateness(self.counts + other.counts, max(self.longest_s, other.longest_s))

    def quantile(self, share: float) -> float:
        """Seconds within which this share of actions ran, to the next fifth. 0 without actions."""
        left = share * self.counts.total()
        for place in sorted(self.counts):
            left -= self.counts[place]
            if left <= 0.0:
                return min(self.longest_s, _LEAST_S * 2.0 ** (place / _BINS))
        return self.longest_s


class WallAgenda(Agenda):
    """Runs actions when they are due, in emulated seconds: ``factor`` for each second of the clock.
    ``now`` is the planned time of the running action, so lateness does not add up."""

    def __init__(self, factor: float, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._factor = factor
        self._clock = clock
        self._zero = clock()
        self.lateness = Lateness()

    def of(self, clock_s: float) -> float:
        """The emulated time at a time of the clock."""
        return (clock_s - self._zero) * self._factor

    def clock_s(self, at: float) -> float:
        """The time of the clock at an emulated time."""
        return self._zero + at / self._factor

    def wait_s(self) -> float:
        """Seconds of the clock until the next action is due. 0 if it is, infinite without one."""
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
    """The workload's prompt for a prompt: the number of its draw, the number of earlier steps that
    sampled it, and its task domain."""

    number: int
    visits: int
    domain: str


class Forced(msg.Submit, frozen=True, kw_only=True):
    """Requests with the draws that determine their lengths."""

    draws: tuple[Draw, ...]


class Punctual(msg.Beat, frozen=True, kw_only=True):
    """A heartbeat with the lateness of a process, which has its first worker's number."""

    process: int
    lateness: Lateness
