"""A reward for emulated runs: it takes the time of a real one, and says what the workload says."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rollpacker.emulate.head import read_head

_PAUSE_S = 2e-2
"""Calls closer together than this are a queue that never stood still."""


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
