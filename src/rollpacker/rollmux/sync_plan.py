"""How new weights get from the training pool to the rollout pool: once over the slow link.

The pools are joined by a slow link (Ethernet between clusters), while ranks of one pool are joined
by a fast one. Sending the model to every rollout rank costs one copy of it per rank on the slow
link. Here every training rank sends one shard, once, and the rollout ranks spread what they were
given among themselves (RollMux, arXiv 2512.11306, "topology-aware model synchronization").
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Bytes ``start`` to ``stop`` of the model: sent by training rank ``source`` to rollout rank
    ``entry``, and by that one to the rest of its pool."""

    source: int
    entry: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Bytes."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncPlan:
    """What is sent by whom, in order of the model's bytes.

    Args:
        total: bytes of the model.
        training: ranks of the training pool.
        rollout: ranks of the rollout pool.
        pieces: each byte is in exactly one.
    """

    total: int
    training: int
    rollout: int
    pieces: tuple[Piece, ...]

    def shard(self, rank: int) -> tuple[int, int]:
        """The bytes that training rank ``rank`` sends: an equal share of the model."""
        return _cut(self.total, self.training, rank), _cut(self.total, self.training, rank + 1)

    @property
    def slow_bytes(self) -> int:
        """Bytes that cross the slow link: one copy of the model."""
        return sum(piece.size for piece in self.pieces)

    @property
    def flat_bytes(self) -> int:
        """Bytes that would cross it if every rollout rank were sent the model."""
        return self.total * self.rollout

    def seconds(self, slow_bytes_per_s: float, fast_bytes_per_s: float) -> float:
        """Time of the exchange when links are the only cost, the two stages not overlapping.

        Args:
            slow_bytes_per_s: of the whole slow link.
            fast_bytes_per_s: into one rollout rank.
        """
        spread = self.total * (1.0 - 1.0 / self.rollout)
        return self.slow_bytes / slow_bytes_per_s + spread / fast_bytes_per_s


def plan_sync(total: int, *, training: int, rollout: int) -> SyncPlan:
    """Cut a model of ``total`` bytes where either pool's equal shares begin.

    Every training rank sends an equal share and every rollout rank enters an equal share, in at
    most ``training + rollout - 1`` pieces. Raises ``ValueError`` on an empty pool.
    """
    if training < 1 or rollout < 1 or total < 0:
        raise ValueError(
            f"sync: {total} bytes from {training} training ranks to {rollout} rollout ranks"
        )
    sources = [_cut(total, training, rank) for rank in range(training + 1)]
    entries = [_cut(total, rollout, rank) for rank in range(rollout + 1)]
    cuts = sorted({*sources, *entries})
    pieces: list[Piece] = []
    source = entry = 0
    for start, stop in pairwise(cuts):
        while sources[source + 1] <= start:
            source += 1
        while entries[entry + 1] <= start:
            entry += 1
        pieces.append(Piece(source=source, entry=entry, start=start, stop=stop))
    return SyncPlan(total=total, training=training, rollout=rollout, pieces=tuple(pieces))


def _cut(total: int, parts: int, index: int) -> int:
    return total * index // parts
