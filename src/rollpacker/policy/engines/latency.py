"""Seconds of a decode step between and beyond the batch sizes at which they were measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


MOST_ROWS = 128
"""Rows of a step up to which one more costs about as much as the last."""
_CHEAPEST = 1e-4
"""Row cost where none was seen: on a large GPU a row is a few thousandths of a step."""


_FREE = 1.15
"""Of a step's least time: what it takes with as many rows as are said to be free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCosts:
    """Rows of a decode step, one for each token that it runs.

    Args:
        free: so many take about as long as one: a step reads all weights anyway.
        each: seconds of one more, over those of a step that has few.
    """

    free: int
    each: float

    def seconds(self, rows: int) -> float:
        """Of a step, over those of one that has few. The free ones are not quite free."""
        share = min(1.0, (rows - 1) / (self.free - 1)) if self.free > 1 else 0.0
        return 1.0 + (_FREE - 1.0) * share + self.each * max(0, rows - self.free)


class LatencyCurve:
    """Seconds of one decode step of one engine, by batch size.

    Piecewise linear through the measured ``points``, made non-decreasing; flat below the first,
    the last slope continued above the last. Raises ``ValueError`` without a positive point.
    """

    def __init__(self, points: Mapping[int, float]) -> None:
        if not points or min(points) < 1 or min(points.values()) <= 0.0:
            raise ValueError("a latency curve needs batch sizes >= 1 with times > 0")
        self.points = points
        self.largest = max(points)
        """Largest batch measured."""
        self._batch: Floats = np.array(sorted(points), np.float64)
        self._seconds: Floats = np.maximum.accumulate([points[size] for size in sorted(points)])
        rise = np.diff(self._seconds[-2:]) / np.diff(self._batch[-2:])
        self._slope = float(rise[0]) if rise.size else 0.0

    def rows(self) -> RowCosts:
        """What rows of a step cost, by the line nearest to the points up to ``MOST_ROWS``."""
        near = self._batch <= max(MOST_ROWS, float(self._batch[0]))
        batch = self._batch[near]
        seconds = np.array([self.points[int(size)] for size in batch])
        least = float(seconds.min())
        free = float(np.interp(_FREE * least, np.maximum.accumulate(seconds), batch))
        if batch.size < 2:
            return RowCosts(free=int(free), each=_CHEAPEST)
        spread = batch - batch.mean()
        slope = float(spread @ seconds) / float(spread @ spread)
        return RowCosts(free=int(free), each=max(slope / least, _CHEAPEST))

    def at(self, batch: float) -> float:
        """Seconds of a step with ``batch`` sequences; 0 with none."""
        if batch <= 0.0:
            return 0.0
        beyond = max(0.0, batch - float(self._batch[-1]))
        return float(np.interp(batch, self._batch, self._seconds)) + self._slope * beyond

    def within(self, batch: Floats) -> Floats:
        """Seconds of steps with 1 to ``largest`` sequences each; no more are reckoned with."""
        return np.interp(batch, self._batch, self._seconds)


def consolidation_threshold(
    latency: Callable[[int], float], engines: int, largest: int, slack: float = 0.25
) -> int:
    """Most running attempts that one engine decodes nearly as fast as all ``engines`` would.

    The largest ``n <= largest`` with ``latency(n) <= (1 + slack) * latency(ceil(n / engines))``:
    below it, moving the tail to one engine frees the others at ``slack`` of the tail's speed.
    0 with a single engine.
    """
    if engines < 2:
        return 0
    return next(
        (
            n
            for n in range(largest, 0, -1)
            if latency(n) <= (1.0 + slack) * latency(math.ceil(n / engines))
        ),
        0,
    )
