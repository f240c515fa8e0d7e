"""The SLO guard: moves a job to nodes of its own before its lifetime SLO is lost."""

from __future__ import annotations

from rollpacker.rollmux.model.cluster import Cluster, CoExecutionGroup, Job
from rollpacker.rollmux.model.seat import POOLS, Seat, SeatState
from rollpacker.rollmux.model.settings import Settings
from rollpacker.rollmux.placement.admission import Admission, affordable, expected

LATE = 1.25  # the next iteration may be longer than expected by this factor
NEXT_WAITS = 1.5
"""Weight of the next iteration's wait, which the slack must cover (experiments/LOG.md)."""
CERTAIN = 0.95  # share of the slack of later iterations that is counted on
CERTAIN_IF_FEW = 0.3
"""The same if nodes are limited, so that there may be none to move to (experiments/LOG.md)."""

SURE = 1.02  # real slowdowns may be higher than simulated by this factor


class SloGuard:
    """Checks a job between two iterations."""

    def __init__(self, cluster: Cluster, settings: Settings, admission: Admission) -> None:
        self._cluster = cluster
        self._settings = settings
        self._admission = admission

    def must_leave(self, job: Job, now: float) -> bool:
        """Whether staying probably violates the SLO, and one more iteration is too many."""
        if job.home is None or job.seat is None or job.destination is not None:
            return False
        group = self._cluster.groups[job.home.group]
        if len(group.seats) < 2:
            return False
        alone = sum(expected(job))
        rest = job.remaining() * alone
        certain = CERTAIN_IF_FEW if self._admission.few else CERTAIN
        credit = certain * (job.spec.slo - 1.0) * rest
        slack = job.spec.slo * job.solo_s - (now - job.started) + credit
        next_wait = self._next_wait(group, job.seat, alone)
        if slack > next_wait + self._settings.cold_s:
            return False
        return rest * LATE * (self._slowdown(job.seat, now) - 1.0) + NEXT_WAITS * next_wait > slack

    def crowded(self, job: Job, now: float) -> bool:
        """Whether its group is expected to violate its SLO, long before it must leave.

        Admission uses an unknown job's worst case, which may be too optimistic. With limited nodes
        the job must ask for some in time.
        """
        if job.home is None or job.destination is not None:
            return False
        seats = self._admission.seats(self._cluster.groups[job.home.group])
        if len(seats) < 2:
            return False
        slowdown = self._admission.slowdown(seats, job, now)
        return slowdown * SURE > affordable(job, now)

    def _next_wait(self, group: CoExecutionGroup, seat: Seat, alone: float) -> float:
        wait = (LATE - 1.0) * alone
        for other in group.seats:
            if other is seat or other.state is SeatState.AWAY:
                continue
            for pool in POOLS:
                if other.masks[pool] & seat.masks[pool]:
                    wait += LATE * other.seconds(pool) + self._settings.warm_s
        return wait

    def _slowdown(self, seat: Seat, now: float) -> float:
        """The slowdown measured in this epoch (the target without a measurement)."""
        return (now - seat.anchor) / seat.solo if seat.solo > 0 else max(seat.target, 1.0)
