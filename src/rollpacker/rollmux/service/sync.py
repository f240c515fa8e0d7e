"""Weights from the training pool to the rollout pool over torch.distributed, as planned.

Ranks of the default process group: the training pool first, then the rollout pool. Only the first
stage, one point-to-point message per chunk, crosses the link between the pools; the second is a
broadcast inside the rollout pool's own group.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import chain, zip_longest
from typing import Any

import torch
import torch.distributed as dist

from rollpacker.rollmux.sync_plan import Piece, SyncPlan

CHUNK = 1 << 20
"""Bytes of a message: what has arrived is spread while the rest is on its way."""


def rollout_group(plan: SyncPlan) -> Any:
    """The process group of the rollout pool. Collective: every rank of both pools calls it."""
    return dist.new_group(list(range(plan.training, plan.training + plan.rollout)))


def send_shard(plan: SyncPlan, rank: int, shard: torch.Tensor, *, chunk: int = CHUNK) -> None:
    """A training rank's part: its share of the model crosses the slow link once.

    Args:
        plan: of both pools.
        rank: in the training pool.
        shard: the bytes ``plan.shard(rank)``, uint8, 1-D.
        chunk: bytes of a message; the same on every rank.

    Raises ``ValueError`` on a shard of another size.
    """
    start, stop = plan.shard(rank)
    _check(shard, stop - start, "shard")
    mine = [piece for piece in plan.pieces if piece.source == rank]
    sending = [
        dist.isend(shard[low - start : high - start], plan.training + piece.entry)
        for piece, low, high in _turns([[piece] for piece in mine], chunk)
    ]
    for work in sending:
        assert work is not None
        work.wait()


def receive(
    plan: SyncPlan,
    rank: int,
    model: torch.Tensor,
    pool: Any,
    *,
    chunk: int = CHUNK,
) -> None:
    """A rollout rank's part: take what is sent to it, give it to its pool, take the rest.

    Args:
        plan: of both pools.
        rank: in the rollout pool.
        model: filled in; ``plan.total`` bytes, uint8, 1-D.
        pool: of ``rollout_group``.
        chunk: bytes of a message; the same on every rank.

    Raises ``ValueError`` on a model of another size.
    """
    _check(model, plan.total, "model")
    by_entry: dict[int, list[Piece]] = defaultdict(list)
    for piece in plan.pieces:
        by_entry[piece.entry].append(piece)
    coming = {
        low: dist.irecv(model[low:high], piece.source)
        for piece, low, high in _turns([[piece] for piece in by_entry[rank]], chunk)
    }
    for piece, low, high in _turns(list(by_entry.values()), chunk):
        if piece.entry == rank:
            work = coming.pop(low)
            assert work is not None
            work.wait()
        dist.broadcast(model[low:high], src=plan.training + piece.entry, group=pool)


def _turns(columns: list[list[Piece]], chunk: int) -> Iterator[tuple[Piece, int, int]]:
    """Chunks of all columns in turn, so that every link is used from the first moment on."""
    rows = zip_longest(*(chain(*(_chunks(piece, chunk) for piece in c)) for c in columns))
    return (part for row in rows for part in row if part is not None)


def _chunks(piece: Piece, chunk: int) -> Iterator[tuple[Piece, int, int]]:
    for low in range(piece.start, piece.stop, chunk):
        yield piece, low, min(low + chunk, piece.stop)


def _check(tensor: torch.Tensor, size: int, what: str) -> None:
    if tensor.dtype != torch.uint8 or tensor.shape != (size,):
        raise ValueError(
            f"sync: the {what} must be {size} bytes (uint8, 1-D), got {tensor.dtype} of shape "
            f"{tuple(tensor.shape)}"
        )
