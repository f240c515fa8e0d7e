"""A reward for emulated runs: it takes the time of a real one, and says what the workload says."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

BASE = 101
"""Token ids that these tokens may have: a vocabulary is to be as large."""
_REWARDS = 50
"""Steps of a reward from 0 to 1; it begins at -1."""
_TICK_S = 1e-5
_TICKS = 3
"""Tokens that hold the seconds, in ticks."""
_PAUSE_S = 2e-2
"""Calls closer together than this are a queue that never stood still."""


def head_of(reward: float, seconds: float) -> NDArray[np.int32]:
    """First tokens that tell a grader its reward, from -1 to 1, and how long to take."""
    ticks = min(round(seconds / _TICK_S), BASE**_TICKS - 1)
    digits = [ticks // BASE**place % BASE for place in range(_TICKS)]
    level = round((min(1.0, max(-1.0, reward)) + 1.0) * _REWARDS)
    return np.array([level, *digits], np.int32)


def read_head(ids: Sequence[int]) -> tuple[float, float]:
    """Reward and seconds, from a response's tokens; what it is too short for is nothing."""
    ticks = sum(digit * BASE**place for place, digit in enumerate(ids[1 : 1 + _TICKS]))
    return ids[0] / _REWARDS - 1.0, ticks * _TICK_S


class Timed:
    """Waits as long as grading the responses takes on the emulated machine.

    Calls that follow each other begin where the last one was to end, so what a call costs besides
    does not add up.
    """

    def __init__(self) -> None:
        self._until = 0.0

    def __call__(self, completion_ids: Sequence[list[int]]) -> list[float]:
        """The rewards of the workload, which measure nothing."""
        read = [read_head(ids) for ids in completion_ids]
        now = time.monotonic()
        begun = self._until if now - self._until < _PAUSE_S else now
        self._until = begun + sum(seconds for _, seconds in read)
        time.sleep(max(0.0, self._until - now))
        return [reward for reward, _ in read]
