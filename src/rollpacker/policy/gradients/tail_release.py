"""The nodes of a rollout that is nearly over go to another job; its tail keeps a few engines.

RollMux's long-tail migration: at about 80% of the responses the rest moves to a quarter of the
engines.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rollpacker.core import decisions as do
from rollpacker.core.types import AttemptId, EngineId
from rollpacker.policy.ledger import Ledger

TAIL_AT = 0.8
"""Share of the responses that are there when the nodes are offered."""


class TailRelease:
    """Offers the nodes once a round, and clears them when somebody takes them.

    Args:
        keep: engines that the tail keeps; 0 offers nothing.
        ledger: what is running.
    """

    def __init__(self, keep: int, ledger: Ledger) -> None:
        self._keep = keep
        self._ledger = ledger
        self.start()

    def start(self) -> None:
        """A step begins: all engines decode."""
        self._offered = False
        self.released = False
        """Whether the freed engines have no node to compute on until the rollout is over."""

    def release(self) -> None:
        """Another job has the nodes."""
        self.released = self._keep > 0

    def decide(self) -> Iterator[do.OfferTail | do.MigrateAttempts]:
        """What is due while a rollout goes on."""
        left = len(self._ledger.running)
        if not self._keep or not left:
            return
        if self.released:
            if self._ledger.busy > self._keep:
                yield from self._moves(self._ledger.by_engine())
        elif not self._offered and left <= (1.0 - TAIL_AT) * len(self._ledger.attempts):
            self._offered = True
            yield do.OfferTail()

    def _moves(
        self, decoding: Mapping[EngineId, tuple[AttemptId, ...]]
    ) -> Iterator[do.MigrateAttempts]:
        """Off the emptiest engines, to whichever of the kept ones has least."""
        fullest = sorted(decoding, key=lambda engine: (-len(decoding[engine]), engine))
        load = {engine: len(decoding[engine]) for engine in fullest[: self._keep]}
        for source in fullest[self._keep :]:
            target = min(load, key=lambda engine: (load[engine], engine))
            load[target] += len(decoding[source])
            yield do.MigrateAttempts(attempts=decoding[source], source=source, target=target)
