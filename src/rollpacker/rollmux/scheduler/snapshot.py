"""The whole state of a scheduler as JSON. A restored scheduler makes the same decisions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rollpacker.rollmux.model.cluster import Cluster, CoExecutionGroup, Job, PoolNode, Reservation
from rollpacker.rollmux.model.seat import SeatState
from rollpacker.rollmux.placement.admission import Rehearsed
from rollpacker.rollmux.scheduler.repack import RepackStep


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSnapshot:
    """The cluster, and all other state on which later decisions depend."""

    jobs: list[Job]
    groups: list[CoExecutionGroup]
    nodes: list[PoolNode]
    inventory: dict[str, Any]
    reservation: Reservation | None
    retry_at: float
    number: int
    token: int
    agenda: list[RepackStep]
    looks: list[tuple[int, float]]
    rehearsed: list[Rehearsed]

    def restore(self, cluster: Cluster) -> None:
        cluster.inventory.load_state_dict(self.inventory)
        cluster.reservation = self.reservation
        cluster.number = self.number
        cluster.nodes |= {node.name: node for node in self.nodes}
        cluster.groups |= {group.id: group for group in self.groups}
        cluster.jobs |= {job.spec.id: job for job in self.jobs}
        cluster.changed |= cluster.groups.keys()
        for group in self.groups:
            for seat in group.seats:
                # Groups and jobs shared seat objects, so share them again.
                job = cluster.jobs[seat.job]
                if seat.state is SeatState.AWAY:
                    job.next_seat = seat
                else:
                    job.seat = seat
