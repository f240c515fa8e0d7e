"""Weights from the training pool's nodes to the rollout pool's over torch.distributed, as planned.

Only the plan's slow transfers, point-to-point messages, cross the link between the pools; the fast
ones are broadcasts inside the rollout pool's own group. Both go in chunks, so that what has arrived
is spread while the rest is on its way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import zip_longest
from typing import Any, cast

import torch
import torch.distributed as dist

from rollpacker.policy.gradients.transfer_plan import Transfer, TransferPlan
from rollpacker.train.mesh import store_at

CHUNK = 1 << 20
"""Bytes of a message; the same on every rank."""


@dataclass(frozen=True, slots=True)
class Pools:
    """The process groups of a transfer: of both pools, and of the rollout pool alone."""

    both: dist.ProcessGroup
    rollout: dist.ProcessGroup | None


def meet_pools(meeting: str, rank: int, *, training: int, world: int, timeout: timedelta) -> Pools:
    """This rank's groups, gloo's: weights cross a network from host memory to host memory.

    Args:
        meeting: where all ``world`` ranks come (``store_at``).
        rank: of this process; the first ``training`` are the training pool's.
        training: ranks of the training pool.
        world: ranks of both.
        timeout: of the meeting and of each message.

    Raises ``RuntimeError`` when the others do not come.
    """
    store = store_at(meeting, world, timeout)
    both = dist.ProcessGroupGloo(_within(store, "both"), rank, world, timeout)
    rollout = None
    if rank >= training:
        place = _within(store, "rollout")
        rollout = dist.ProcessGroupGloo(place, rank - training, world - training, timeout)
    return Pools(cast(Any, both), cast(Any, rollout))


def _within(store: Any, name: str) -> Any:
    return dist.PrefixStore(name, store)  # pyright: ignore[reportPrivateImportUsage]


def send_weights(plan: TransferPlan, rank: int, model: torch.Tensor, pools: Pools) -> None:
    """A training rank's part: its share of the model crosses the slow link once.

    Args:
        plan: of both pools.
        rank: in the group of both.
        model: the bytes of the flat model, uint8, 1-D; only this rank's share is read.
        pools: of ``meet_pools``.

    Raises ``ValueError`` on a model of another size.
    """
    _check(plan, model)
    mine = [each for each in plan.transfers if each.slow and each.source == rank]
    sending = [
        pools.both.send([model[low:high]], each.targets[0], 0) for each, low, high in _turns(mine)
    ]
    for work in sending:
        work.wait()


def receive_weights(plan: TransferPlan, rank: int, model: torch.Tensor, pools: Pools) -> None:
    """A rollout rank's part: take what is sent to it, give it to its pool, take the rest.

    Args:
        plan: of both pools.
        rank: in the group of both.
        model: filled in; the bytes of the flat model, uint8, 1-D.
        pools: of ``meet_pools``.

    Raises ``ValueError`` on a model of another size.
    """
    _check(plan, model)
    slow = [each for each in plan.transfers if each.slow]
    mine = [each for each in slow if each.targets[0] == rank]
    coming = {
        low: pools.both.recv([model[low:high]], each.source, 0) for each, low, high in _turns(mine)
    }
    assert pools.rollout is not None
    first = pools.both.size() - pools.rollout.size()
    options = dist.BroadcastOptions()
    for each, low, high in _turns(slow):
        if each.targets[0] == rank:
            coming.pop(low).wait()
        options.rootRank = each.targets[0] - first
        pools.rollout.broadcast([model[low:high]], options).wait()


def _turns(transfers: Sequence[Transfer]) -> Iterator[tuple[Transfer, int, int]]:
    """Chunks of all transfers in turn, so that every link is used from the first moment on."""
    rows = zip_longest(*(list(_chunks(each)) for each in transfers))
    return (part for row in rows for part in row if part is not None)


def _chunks(transfer: Transfer) -> Iterator[tuple[Transfer, int, int]]:
    for low in range(transfer.start, transfer.stop, CHUNK):
        yield transfer, low, min(low + CHUNK, transfer.stop)


def _check(plan: TransferPlan, model: torch.Tensor) -> None:
    if model.dtype != torch.uint8 or model.shape != (plan.slow_bytes,):
        raise ValueError(
            f"sync: the model must be {plan.slow_bytes} bytes (uint8, 1-D), got {model.dtype} of "
            f"shape {tuple(model.shape)}"
        )
