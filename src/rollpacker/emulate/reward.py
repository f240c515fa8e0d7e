"""A reward for emulated runs: it takes a real one's time, and returns the workload's reward."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

BASE = 101
"""The number of token ids that may occur in a head. The vocabulary must not be smaller."""
_REWARDS = 50
"""Levels of a reward between 0 and 1, and as many between -1 and 0."""
_TICK_S = 1e-5
_TICKS = 3
"""Tokens that hold the seconds, in ticks."""
_PAUSE_S = 2e-2
"""Calls closer than this are a queue without a gap."""


def head_of(reward: float, seconds: float) -> NDArray[np.int32]:
    """The first tokens of a response: its reward from -1 to 1 and its seconds of grading."""
    ticks = min(round(seconds / _TICK_S), BASE**_TICKS - 1)
    digits = [ticks // BASE**place % BASE for place in range(_TICKS)]
    level = round((min(1.0, max(-1.0, reward)) + 1.0) * _REWARDS)
    return np.array([level, *digits], np.int32)


def read_head(ids: Sequence[int]) -> tuple[float, float]:
    """The reward and seconds of a response. Tokens that a short response lacks count as 0."""
    ticks = sum(digit * BASE**place for place, digit in enumerate(ids[1 : 1 + _TICKS]))
    return ids[0] / _REWARDS - 1.0, ticks * _TICK_S


class Timed:
    """Waits for the time that grading takes on the emulated machine. A queued call begins at the
    planned end of the last one, so overhead does not add up."""

    def __init__(self) -> None:
        self._until = 0.0

    def __call__(self, completion_ids: Sequence[list[int]]) -> list[float]:
        """Return the rewards of the workload, which measure nothing."""
        read = [read_head(ids) for ids in completion_ids]
        now = time.monotonic()
        begun = self._until if now - self._until < _PAUSE_S else now
        self._until = begun + sum(seconds for _, seconds in read)
        time.sleep(max(0.0, self._until - now))
        return [reward for reward, _ in read]
