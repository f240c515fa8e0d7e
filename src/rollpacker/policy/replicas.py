"""Where gradients are summed, and when that may begin."""

from __future__ import annotations

from rollpacker.core.types import WorkerId
from rollpacker.policy.ledger import Ledger


class Colocated:
    """Training replicas on the devices of the engines: one is free while none of them decodes.

    Args:
        ledger: what the engines run.
        size: neighbouring workers that make one replica; the first of them is given its work.
    """

    def __init__(self, ledger: Ledger, size: int) -> None:
        self._ledger = ledger
        self._size = size
        self._members: dict[WorkerId, tuple[WorkerId, ...]] = {}
        self._of: dict[WorkerId, WorkerId] = {}

    def start(self, workers: tuple[WorkerId, ...]) -> list[WorkerId]:
        """A step begins: its replicas."""
        size = self._size
        members = [workers[i : i + size] for i in range(0, len(workers), size)]
        self._members = {each[0]: each for each in members}
        self._of = {worker: each[0] for each in members for worker in each}
        return list(self._members)

    def of(self, worker: WorkerId) -> WorkerId | None:
        """The replica that a worker is in; None where that is gone."""
        return self._of.get(worker)

    def free(self, replica: WorkerId) -> bool:
        """Whether it may sum gradients while the rollout goes on."""
        return not any(map(self._ledger.decodes, self._members[replica]))

    def lose(self, worker: WorkerId) -> WorkerId | None:
        """A worker has died; the replica that died with it, if it was in one."""
        replica = self._of.get(worker)
        for member in () if replica is None else self._members.pop(replica):
            del self._of[member]
        return replica
