"""Which engine an attempt runs on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heapify, heapreplace

from rollpacker.core.types import EngineId
from rollpacker.policy.ledger import Ledger


class EnginePlacement:
    """Keeps engines evenly loaded, by running attempts; ties go to the lowest id.

    Args:
        ledger: what they run.
        engines: those of the round.
    """

    def __init__(self, ledger: Ledger, engines: Sequence[EngineId]) -> None:
        self._ledger = ledger
        self._engines = engines
        self._retired: set[EngineId] = set()

    @property
    def engines(self) -> list[EngineId]:
        """Those that live."""
        return [engine for engine in self._engines if engine in self._ledger.loads]

    def retire(self, engine: EngineId) -> None:
        """Start nothing there any more; what it runs is moving, but may die with it."""
        self._retired.add(engine)

    def choose(self) -> Iterator[EngineId]:
        """The least loaded engine of each moment, a retired one only when there is no other.

        Good for as long as attempts are only started. Raises ``RuntimeError`` when none is left.
        """
        loads = self._ledger.loads
        order = [(engine in self._retired, loads[engine], engine) for engine in self.engines]
        if not order:
            raise RuntimeError("every worker has died; the run cannot go on")
        heapify(order)
        while True:
            retired, load, engine = order[0]
            if load == loads[engine]:
                yield engine
            else:
                heapreplace(order, (retired, loads[engine], engine))
