"""Permits: the jobs that may run a phase now, in each group."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush

from rollpacker.rollmux.model import decisions as do
from rollpacker.rollmux.model.cluster import Cluster, CoExecutionGroup, Job
from rollpacker.rollmux.model.seat import IDLE, NEVER, ROLLOUT, RUNNING, TRAIN, WAITING, Seat
from rollpacker.rollmux.model.settings import Settings
from rollpacker.rollmux.model.tail_model import (
    SLOWEST_BESIDE,
    TAIL_COST,
    expected_extra,
    to_release,
)
from rollpacker.rollmux.placement.admission import affordable
from rollpacker.rollmux.placement.permit_order import earliest_deadline, load_bound


def due(job: Job, seat: Seat, pool: int, now: float, settings: Settings) -> float:
    """Latest end of a phase that starts now, if the job's worst case is right."""
    worst = job.spec.worst_rollout_s if pool == ROLLOUT else job.spec.worst_train_s
    longest = max(worst, seat.seconds(pool))
    return now + settings.warm_s + longest * SLOWEST_BESIDE


class WakeTimers:
    """Times to reconsider a group without an event, because the member that another waits for is
    late."""

    def __init__(self) -> None:
        self._times: dict[int, float] = {}
        self._heap: list[tuple[float, int]] = []
        """All noted times, including outdated ones that ``next`` skips."""

    def note(self, group: CoExecutionGroup, now: float) -> None:
        seats = group.seats
        self._times.pop(group.id, None)
        if any(seat.state in WAITING for seat in seats):
            near = (seat for seat in seats if seat.state in (*IDLE, *RUNNING))
            times = [at for seat in near if (at := seat.counted_on_until()) > now]
            if times:
                self._times[group.id] = min(times)
                heappush(self._heap, (self._times[group.id], group.id))

    def times(self) -> list[tuple[int, float]]:
        return sorted(self._times.items())

    def restore(self, times: Iterable[tuple[int, float]]) -> None:
        for group, at in times:
            self._times[group] = at
            heappush(self._heap, (at, group))

    def next(self) -> float:
        """The first time (``seat.NEVER`` for none)."""
        while self._heap and self._times.get(self._heap[0][1]) != self._heap[0][0]:
            heappop(self._heap)
        return self._heap[0][0] if self._heap else NEVER

    def take(self, now: float) -> list[int]:
        due: list[int] = []
        while self.next() <= now:
            due.append(heappop(self._heap)[1])
            del self._times[due[-1]]
        return due


class Permits:
    """Hands out permits in the groups that an event has touched. Decisions go to ``made``."""

    def __init__(self, cluster: Cluster, settings: Settings, made: list[do.Decision]) -> None:
        self._cluster = cluster
        self._settings = settings
        self._made = made
        self._touched: dict[int, None] = {}
        self.timers = WakeTimers()
        self.token = 0

    def touch(self, group: int) -> None:
        self._touched[group] = None

    def hand_out(self, now: float) -> None:
        for number in list(self._touched):
            if (group := self._cluster.groups.get(number)) is not None:
                self._dispatch(group, now)
                self.timers.note(group, now)
        self._touched.clear()

    def time_passed(self, now: float) -> None:
        for number in self.timers.take(now):
            self.touch(number)

    def rebase(self, group: CoExecutionGroup, now: float) -> None:
        """A group's members or their order have changed: set new targets for all."""
        group.epoch += 1
        self._cluster.changed.add(group.id)
        self.touch(group.id)
        seats = group.in_order()
        reserve = (load_bound(seats) + self._settings.cold_s) if len(seats) > 1 else 0.0
        for seat in seats:
            slowdown = affordable(self._cluster.jobs[seat.job], now, reserve)
            seat.promise(slowdown * (1.0 - self._settings.margin), since=now)
        order = tuple(seat.job for seat in seats)
        self._made.append(do.Rebase(group=group.id, epoch=group.epoch, order=order))

    def _dispatch(self, group: CoExecutionGroup, now: float) -> None:
        for pool in (TRAIN, ROLLOUT):
            self._grant(group, pool, now)
        if self._settings.tails and self._release_tails(group):
            self._grant(group, ROLLOUT, now)

    def _grant(self, group: CoExecutionGroup, pool: int, now: float) -> None:
        while (seat := earliest_deadline(group.seats, pool, now)) is not None:
            job = self._cluster.jobs[seat.job]
            assert job.home is not None
            beside_s = expected_extra(group.seats, seat, now) if pool == ROLLOUT else 0.0
            late_at = due(job, seat, pool, now, self._settings)
            seat.start(pool, now, late_at, beside_s=beside_s)
            job.token = self.token
            job.tail_reached = False
            self.token += 1
            self._made.append(
                do.Permit(
                    job=seat.job,
                    phase="rollout" if pool == ROLLOUT else "train",
                    token=job.token,
                    group=group.id,
                    epoch=group.epoch,
                    position=seat.position,
                    nodes=job.home.nodes[pool],
                )
            )

    def _release_tails(self, group: CoExecutionGroup) -> bool:
        jobs = self._cluster.jobs
        found = to_release(group.seats, lambda seat: jobs[seat.job].tail_reached)
        for seat in found:
            home = self._cluster.jobs[seat.job].home
            assert home is not None
            seat.leave_to_tail(TAIL_COST)
            self._made.append(do.ReleaseTail(job=seat.job, nodes=home.nodes[0]))
        return bool(found)
