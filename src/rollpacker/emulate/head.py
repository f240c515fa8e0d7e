"""The first tokens of an emulated response: its reward, and how long grading it takes."""

from __future__ import annotations

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
