"""A worker's part in bringing shared weights to other nodes, one process on each.

Rank 0 sends them to one other node, which broadcasts them to the rest. So they cross the link
between training and rollout nodes once.
"""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollpacker.runtime.messages import messages as msg
from rollpacker.runtime.messages.shared_weights import SharedWeights, WeightsOut, mapped, reserved

if TYPE_CHECKING:
    import torch

_PATIENCE = timedelta(seconds=60)
"""The time for others to come, and for each piece."""
CHUNK = 1 << 20
"""Bytes of a message, the same on every rank."""


class WeightRelay:
    """Sends or receives the bytes of a file of weights."""

    def __init__(self) -> None:
        self._meeting = ""
        self._groups: tuple[Any, Any] | None = None
        self._got: Path | None = None

    def send(self, command: msg.Carry, out: WeightsOut | None) -> msg.Carried:
        assert out is not None, "weights are shared before they are carried"
        return self._carry(command, out.shared)

    def receive(self, command: msg.Carry) -> msg.Carried:
        return self._carry(command, None)

    def _carry(self, command: msg.Carry, weights: SharedWeights | None) -> msg.Carried:
        start, problem = time.monotonic(), ""
        try:
            if weights is None:
                self._got = self._got or reserved(command.size, command.name)
                weights = SharedWeights(self._got, command.size)
            if self._groups is None or self._meeting != command.meeting:
                self._groups = meet(command.meeting, command.rank, command.world)
                self._meeting = command.meeting
            carry(mapped(weights.path), command.rank, *self._groups)
        except (RuntimeError, ValueError) as error:
            self._groups, weights, problem = None, None, str(error).partition("\n")[0]
        end = time.monotonic()
        return msg.Carried(weights=weights, start_s=start, end_s=end, problem=problem)

    def close(self) -> None:
        if self._got is not None:
            self._got.unlink(missing_ok=True)


def meet(meeting: str, rank: int, world: int) -> tuple[Any, Any]:
    """Process groups of all ranks, and of the receivers alone (None for rank 0). Gloo sends from
    host memory to host memory. Raises ``RuntimeError`` if the others do not come (``store_at``)."""
    import torch.distributed as dist

    from rollpacker.train.mesh import store_at

    store: Any = store_at(meeting, world, _PATIENCE)
    every, rest = (dist.PrefixStore(name, store) for name in ("every", "rest"))  # pyright: ignore
    both = dist.ProcessGroupGloo(every, rank, world, _PATIENCE)
    return both, dist.ProcessGroupGloo(rest, rank - 1, world - 1, _PATIENCE) if rank else None


def carry(model: torch.Tensor, rank: int, both: Any, receivers: Any) -> None:
    """Copy the bytes of rank 0's ``model``, uint8, 1-D, to every other rank."""
    import torch.distributed as dist

    chunks = model.split(CHUNK)
    work = [both.send([chunk], 1, 0) for chunk in chunks if rank == 0]
    work += [both.recv([chunk], 0, 0) for chunk in chunks if rank == 1]
    for place, chunk in enumerate(chunks):
        if rank < 2:
            work[place].wait()
        if receivers is not None and receivers.size() > 1:
            receivers.broadcast([chunk], dist.BroadcastOptions()).wait()  # from its first rank
