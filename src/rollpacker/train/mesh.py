"""The processes of a replica, and those that hold the same part of other replicas."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor


def store_at(meeting: str, world: int, timeout: timedelta) -> dist.Store:  # pyright: ignore[reportPrivateImportUsage]
    """The store at which ``world`` processes meet. ``meeting`` is ``tcp://HOST:PORT/NAME`` of a
    running store, or on one machine the path of a file. Raises ``RuntimeError`` without a store."""
    if not meeting.startswith("tcp://"):
        store: Any = dist.FileStore(meeting, world)  # pyright: ignore[reportPrivateImportUsage]
    else:
        place, _, name = meeting.removeprefix("tcp://").partition("/")
        host, _, port = place.rpartition(":")
        kept: Any = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
            host, int(port), is_master=False, timeout=timeout
        )
        store = dist.PrefixStore(name, kept)  # pyright: ignore[reportPrivateImportUsage]
    store.set_timeout(timeout)
    return store


def meet(
    meeting: str,
    rank: int,
    world: int,
    timeout: timedelta,
    device: torch.device,
    *,
    crowded: bool = False,
) -> dist.ProcessGroup | None:
    """A trainer's ``world``: ``rank`` (its replica's) of ``world``, which meet once (``store_at``).
    None if it is alone.

    The group is separate from the default group, and can only reduce. If a replica is lost, the
    others and its replacement meet again elsewhere, while the groups within replicas stay.
    ``timeout`` limits the meeting and each reduction. ``crowded``: several of them share a GPU,
    which NCCL refuses.

    Raises ``RuntimeError`` when the others do not come within ``timeout``.
    """
    if world == 1:
        return None
    store = store_at(meeting, world, timeout)
    if device.type == "cuda" and not crowded:
        options: Any = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        group: Any = dist.ProcessGroupNCCL(store, rank, world, options)
    else:
        group = dist.ProcessGroupGloo(store, rank, world, timeout)
    return cast(dist.ProcessGroup, group)


def add_up(values: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Replace ``values`` by their sum over a group, also one of ``meet``."""
    # torch.distributed's own functions know only groups that they made.
    group.allreduce([values]).wait()


class Members:
    """The processes of this replica, this one among them. Without a group it is alone."""

    def __init__(
        self, group: dist.ProcessGroup | None = None, device: torch.device | None = None
    ) -> None:
        self.group = group
        self._device = device
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        if self.group is not None:
            add_up(values, self.group)
        return values

    def largest(self, values: torch.Tensor) -> torch.Tensor:
        if self.group is not None:
            dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self.group)
        return values

    def each(self, value: int) -> list[int]:
        values = torch.zeros(self.size, dtype=torch.int64, device=self._device)
        values[self.rank] = value
        return self.sum(values).tolist()

    def agree(self, failure: Exception | None, elsewhere: Exception) -> None:
        """Raise ``failure``, or ``elsewhere`` if only another member failed, so that no member
        waits for it."""
        failed = any(self.each(failure is not None))
        if failure is not None:
            raise failure
        if failed:
            raise elsewhere


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a tensor of which this process may hold a part. All members must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def part(tensor: torch.Tensor) -> torch.Tensor:
    """This process's part of a tensor, in the same storage."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


def parted(local: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A tensor spread like ``like``, from this process's part ``local``."""
    if not isinstance(like, DTensor):
        return local
    return DTensor.from_local(
        local,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )
