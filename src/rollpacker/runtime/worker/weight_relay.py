"""A worker's part in bringing shared weights to other nodes: one process of each node has one."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from rollpacker.policy.gradients.transfer_plan import TransferPlan, plan_transfers
from rollpacker.runtime.messages import messages as msg
from rollpacker.runtime.messages.shared_weights import SharedWeights, WeightsOut, mapped, reserved

if TYPE_CHECKING:
    from rollpacker.runtime.messages.weight_broadcast import Pools

_PATIENCE = timedelta(seconds=60)
"""For the others to come, and for each piece."""


class WeightRelay:
    """Sends or receives the bytes of a file of weights, once for a node, and once over the link
    between the node that has them and the others (``plan_transfers``)."""

    def __init__(self) -> None:
        self._meeting = ""
        self._pools: Pools | None = None
        self._got: Path | None = None

    def send(self, command: msg.Carry, out: WeightsOut | None) -> msg.Carried:
        """The part of the node that has them."""
        from rollpacker.runtime.messages.weight_broadcast import send_weights

        start = time.monotonic()
        assert out is not None, "weights are shared before they are carried"
        try:
            plan, pools = self._meet(command)
            send_weights(plan, command.rank, mapped(out.shared.path), pools)
        except (RuntimeError, ValueError) as error:
            return self._failed(error, start)
        return msg.Carried(weights=out.shared, start_s=start, end_s=time.monotonic())

    def receive(self, command: msg.Carry) -> msg.Carried:
        """The part of a node that needs them."""
        from rollpacker.runtime.messages.weight_broadcast import receive_weights

        start = time.monotonic()
        try:
            self._got = self._got or reserved(command.size, command.name)
            plan, pools = self._meet(command)
            receive_weights(plan, command.rank, mapped(self._got), pools)
        except (RuntimeError, ValueError) as error:
            return self._failed(error, start)
        weights = SharedWeights(self._got, command.size)
        return msg.Carried(weights=weights, start_s=start, end_s=time.monotonic())

    def _meet(self, command: msg.Carry) -> tuple[TransferPlan, Pools]:
        from rollpacker.runtime.messages.weight_broadcast import meet_pools

        if self._pools is None or self._meeting != command.meeting:
            self._pools = meet_pools(
                command.meeting, command.rank, training=1, world=command.world, timeout=_PATIENCE
            )
            self._meeting = command.meeting
        return plan_transfers(command.size, [0], range(1, command.world), align=1), self._pools

    def _failed(self, error: Exception, start: float) -> msg.Carried:
        self._pools = None
        problem = str(error).partition("\n")[0]
        return msg.Carried(weights=None, start_s=start, end_s=time.monotonic(), problem=problem)

    def close(self) -> None:
        """Leave nothing behind."""
        if self._got is not None:
            self._got.unlink(missing_ok=True)
