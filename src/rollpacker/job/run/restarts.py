"""How often a run that has lost what it cannot go on without starts again by itself."""

from __future__ import annotations


class Restarts:
    """Counts those without a newer checkpoint in between.

    Args:
        limit: so many at most.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._used = 0
        self._newest = -1
        self._begun = False

    def begin(self) -> None:
        """The first step is near: a run that fails before has a mistake in it."""
        self._begun = True

    def again(self, newest: int) -> bool:
        """Whether to start again; ``newest``: step of the newest checkpoint, -1 without one."""
        if newest > self._newest:
            self._newest, self._used = newest, 0
        if not self._begun or self._used >= self._limit:
            return False
        self._used += 1
        return True

    def __str__(self) -> str:
        where = "the beginning" if self._newest < 0 else f"checkpoint-{self._newest}"
        count = f"{self._used} of cluster.restarts={self._limit}"
        return f"the run starts again from {where} ({count})"
