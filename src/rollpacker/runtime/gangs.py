"""Replicas of one or several workers: whom a command goes to, and what their reports come to."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import replace

from rollpacker.core.types import ReplicaId
from rollpacker.runtime import messages as msg


class Gangs:
    """Neighbouring workers in replicas; each has the number of its first worker, its lead.

    Args:
        workers: ascending.
        size: workers of a replica; their number is a multiple of it.
    """

    def __init__(self, workers: Sequence[int], size: int) -> None:
        parts = [tuple(workers[at : at + size]) for at in range(0, len(workers), size)]
        self.members = {ReplicaId(part[0]): part for part in parts}
        self.of = {worker: replica for replica, part in self.members.items() for worker in part}
        self._said: dict[int, deque[msg.ReplicaReport]] = {worker: deque() for worker in workers}

    def whole(self, live: Collection[int]) -> tuple[ReplicaId, ...]:
        """Replicas all of whose workers live."""
        return tuple(r for r, part in self.members.items() if all(w in live for w in part))

    def hear(self, worker: int, report: msg.ReplicaReport) -> msg.ReplicaReport | None:
        """The replica's report, when all of its workers have sent theirs.

        Each of them covers the whole replica, so it is the lead's; it took from the first's start
        to the last's end.
        """
        part = self.members[self.of[worker]]
        if len(part) == 1:
            return report
        self._said[worker].append(report)
        if not all(self._said[member] for member in part):
            return None
        said = [self._said[member].popleft() for member in part]
        began, ended = min(each.start_s for each in said), max(each.end_s for each in said)
        return replace(said[0], start_s=began, end_s=ended)
