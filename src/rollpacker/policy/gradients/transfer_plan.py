"""How new weights reach the rollout pool: once over the slow link, then over the fast one.

Training devices are grouped by node on one side of a slow link, rollout devices on the other.
The naive way sends every rollout device its own copy across. The plan cuts the model into one
shard per training device, sends each shard across once, to a rollout device of its own, and
broadcasts it inside the rollout pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One message: bytes ``start`` to ``stop`` of the flat model, from a device to others.

    Args:
        stage: transfers of a stage may run at once; a stage begins when its sources hold the
            bytes.
        slow: whether it crosses the slow link.
    """

    stage: int
    source: int
    targets: tuple[int, ...]
    start: int
    stop: int
    slow: bool

    @property
    def size(self) -> int:
        """Bytes."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferPlan:
    """Transfers in order of their stages."""

    transfers: tuple[Transfer, ...]

    @property
    def slow_bytes(self) -> int:
        """Bytes over the slow link: one copy of the model."""
        return sum(each.size * len(each.targets) for each in self.transfers if each.slow)


def plan_transfers(
    model_bytes: int, train: Sequence[int], rollout: Sequence[int], *, align: int = 2
) -> TransferPlan:
    """Scatter one shard per training device across the slow link, then broadcast.

    Args:
        model_bytes: of the flat model, which every training device holds.
        train: ranks of the training devices.
        rollout: ranks of the rollout devices.
        align: shards begin at multiples of so many bytes (of one element).

    Raises:
        ValueError: an empty pool, a rank on both sides, or a size that is no multiple of ``align``.
    """
    if not train or not rollout:
        raise ValueError("sync plan: both pools need at least one device")
    if set(train) & set(rollout) or len({*train, *rollout}) < len(train) + len(rollout):
        raise ValueError("sync plan: a rank may be there once, on one side")
    if model_bytes < align or model_bytes % align:
        raise ValueError(f"sync plan: {model_bytes} bytes are no whole elements of {align} bytes")
    transfers: list[Transfer] = []
    for number, (start, stop) in enumerate(_shards(model_bytes, len(train), align)):
        root = rollout[number % len(rollout)]
        transfers.append(
            Transfer(
                stage=0, source=train[number], targets=(root,), start=start, stop=stop, slow=True
            )
        )
        others = tuple(rank for rank in rollout if rank != root)
        if others:
            transfers.append(
                Transfer(stage=1, source=root, targets=others, start=start, stop=stop, slow=False)
            )
    return TransferPlan(transfers=tuple(sorted(transfers, key=lambda each: each.stage)))


def _shards(total: int, count: int, align: int) -> list[tuple[int, int]]:
    """Nearly equal shards; fewer than ``count`` if there are fewer elements."""
    elements = total // align
    edges = [elements * number // count * align for number in range(count + 1)]
    return [(a, b) for a, b in pairwise(edges) if b > a]
