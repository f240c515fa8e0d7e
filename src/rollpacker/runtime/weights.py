"""Weights from the training pool to the rollout pool over torch.distributed, as planned.

Only the plan's slow transfers, point-to-point messages, cross the link between the pools; the fast
ones are broadcasts inside the rollout pool's own group. Both go in chunks, so that what has arrived
is spread while the rest is on its way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist

from rollpacker.policy.publish import PublishPlan, Transfer

CHUNK = 1 << 20
"""Bytes of a message; the same on every rank."""


def rollout_group(rollout: Sequence[int]) -> Any:
    """The process group of the rollout pool's ranks. Collective: both pools call it."""
    return dist.new_group(list(rollout))


def send_weights(plan: PublishPlan, rank: int, model: torch.Tensor, *, chunk: int = CHUNK) -> None:
    """A training rank's part: its share of the model crosses the slow link once.

    Args:
        plan: of both pools.
        rank: in the default process group.
        model: the bytes of the flat model, uint8, 1-D; only this rank's share is read.
        chunk: bytes of a message.

    Raises ``ValueError`` on a model of another size.
    """
    _check(plan, model)
    mine = [each for each in plan.transfers if each.slow and each.source == rank]
    sending = [
        dist.isend(model[low:high], each.targets[0]) for each, low, high in _turns(mine, chunk)
    ]
    for work in sending:
        assert work is not None
        work.wait()


def receive_weights(
    plan: PublishPlan, rank: int, model: torch.Tensor, pool: Any, *, chunk: int = CHUNK
) -> None:
    """A rollout rank's part: take what is sent to it, give it to its pool, take the rest.

    Args:
        plan: of both pools.
        rank: in the default process group.
        model: filled in; the bytes of the flat model, uint8, 1-D.
        pool: of ``rollout_group``.
        chunk: bytes of a message.

    Raises ``ValueError`` on a model of another size.
    """
    _check(plan, model)
    slow = [each for each in plan.transfers if each.slow]
    mine = [each for each in slow if each.targets[0] == rank]
    coming = {
        low: dist.irecv(model[low:high], each.source) for each, low, high in _turns(mine, chunk)
    }
    for each, low, high in _turns(slow, chunk):
        if each.targets[0] == rank:
            work = coming.pop(low)
            assert work is not None
            work.wait()
        dist.broadcast(model[low:high], src=each.targets[0], group=pool)


def _turns(transfers: Sequence[Transfer], chunk: int) -> Iterator[tuple[Transfer, int, int]]:
    """Chunks of all transfers in turn, so that every link is used from the first moment on."""
    rows = zip_longest(*(list(_chunks(each, chunk)) for each in transfers))
    return (part for row in rows for part in row if part is not None)


def _chunks(transfer: Transfer, chunk: int) -> Iterator[tuple[Transfer, int, int]]:
    for low in range(transfer.start, transfer.stop, chunk):
        yield transfer, low, min(low + chunk, transfer.stop)


def _check(plan: PublishPlan, model: torch.Tensor) -> None:
    if model.dtype != torch.uint8 or model.shape != (plan.slow_bytes,):
        raise ValueError(
            f"sync: the model must be {plan.slow_bytes} bytes (uint8, 1-D), got {model.dtype} of "
            f"shape {tuple(model.shape)}"
        )
