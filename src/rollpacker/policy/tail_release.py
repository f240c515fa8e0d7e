"""The nodes of a rollout that is nearly over go to another job; its tail keeps a few workers.

RollMux's long-tail migration: at about 80% of the responses the rest moves to a quarter of the
workers.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping

from rollpacker.core import decisions as do
from rollpacker.core.types import AttemptId, WorkerId

TAIL_AT = 0.8
"""Share of the responses that are there when the nodes are offered."""
TAIL_WORKERS = 0.25
"""Share of the workers that a tail goes on with."""


def tail_workers(workers: int) -> int:
    """How many a tail keeps; 0 where that frees none."""
    kept = math.ceil(TAIL_WORKERS * workers)
    return kept if kept < workers else 0


class TailRelease:
    """Offers the nodes once a round, and clears them when somebody takes them.

    Args:
        keep: workers that the tail keeps; 0 offers nothing.
    """

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self.start()

    def start(self) -> None:
        """A step begins: all workers decode."""
        self._started = 0
        self._offered = False
        self.released = False
        """Whether the freed workers have no node to compute on until the rollout is over."""

    def count(self) -> None:
        """A response was begun."""
        self._started += 1

    def release(self) -> None:
        """Another job has the nodes."""
        self.released = self._keep > 0

    def decide(
        self, running: Mapping[WorkerId, Collection[AttemptId]]
    ) -> Iterator[do.OfferTail | do.MigrateAttempts]:
        """What is due while a rollout goes on.

        Args:
            running: what each live worker decodes.
        """
        decoding = {worker: attempts for worker, attempts in running.items() if attempts}
        if not self._keep or not decoding:
            return
        left = sum(map(len, decoding.values()))
        if self.released:
            yield from self._moves(decoding)
        elif not self._offered and left <= (1.0 - TAIL_AT) * self._started:
            self._offered = True
            yield do.OfferTail()

    def _moves(
        self, decoding: Mapping[WorkerId, Collection[AttemptId]]
    ) -> Iterator[do.MigrateAttempts]:
        """Off the emptiest workers, to whichever of the kept ones has least."""
        fullest = sorted(decoding, key=lambda worker: (-len(decoding[worker]), worker))
        load = {worker: len(decoding[worker]) for worker in fullest[: self._keep]}
        for source in fullest[self._keep :]:
            target = min(load, key=lambda worker: (load[worker], worker))
            attempts = tuple(sorted(decoding[source]))
            load[target] += len(attempts)
            yield do.MigrateAttempts(attempts=attempts, source=source, target=target)
