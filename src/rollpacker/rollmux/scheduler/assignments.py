"""Assigns nodes to jobs, moves jobs, and takes nodes away."""

from __future__ import annotations

from rollpacker.rollmux.model import decisions as do
from rollpacker.rollmux.model.cluster import Cluster, Job
from rollpacker.rollmux.model.seat import SeatState
from rollpacker.rollmux.model.settings import Settings
from rollpacker.rollmux.placement.placement import Site
from rollpacker.rollmux.scheduler.permits import Permits
from rollpacker.rollmux.scheduler.queue import Queue
from rollpacker.rollmux.scheduler.reservations import Reservations


class Assignments:
    """Carries out the choices of placement, repacking, guard and queue into ``made``."""

    def __init__(
        self,
        cluster: Cluster,
        settings: Settings,
        moves: Reservations,
        permits: Permits,
        queue: Queue,
        made: list[do.Decision],
    ) -> None:
        self._cluster = cluster
        self._settings = settings
        self._reservations = moves
        self._permits = permits
        self._queue = queue
        self._made = made

    def admit(self, job: Job, site: Site, now: float) -> None:
        new, stood = not job.admitted, job.stopped_at is not None and not job.stranded
        self._queue.take(job, now)
        self._reservations.reserve(job, site)
        if not new:
            self.begin(job, now, "resume" if stood else "failure")
            return
        self._made += self._reservations.take(job, now + self._settings.cold_s)
        assert job.home is not None
        self._permits.rebase(self._cluster.groups[job.home.group], now)

    def wait(self, job: Job, now: float, *, clock_runs: bool) -> None:
        self._queue.put(job, now, clock_runs=clock_runs)
        job.asked = False

    def begin(self, job: Job, now: float, reason: do.Reason) -> None:
        home = job.destination
        assert home is not None
        job.going, job.went_at = True, now
        if job.seat is not None:
            self._permits.rebase(self._reservations.depart(job), now)
        self._made += self._reservations.acquire(home)
        self._made.append(
            do.Move(
                job=job.spec.id,
                group=home.group,
                epoch=self._cluster.groups[home.group].epoch,
                rollout=home.nodes[0],
                train=home.nodes[1],
                memory_gb=self._reservations.memory(job, home),
                reason=reason,
            )
        )

    def begin_if_idle(self, job: Job, now: float, reason: do.Reason) -> None:
        """The same at once for a job between two iterations. Others move after their iteration."""
        if between_iterations(job):
            assert job.seat is not None
            job.asked = job.seat.state is SeatState.WAIT_R
            self.begin(job, now, reason)

    def arrive(self, job: Job, now: float) -> None:
        self._release(self._reservations.arrive(job, now + self._settings.cold_s))
        assert job.home is not None
        self._permits.rebase(self._cluster.groups[job.home.group], now)

    def suspend_if_idle(self, job: Job, now: float) -> None:
        """The same at once for a job between two iterations. Others stop after their iteration."""
        if between_iterations(job) and not job.going:
            self.suspend(job, now)

    def suspend(self, job: Job, now: float) -> None:
        """A job between two iterations gives up its nodes and waits. Its clock stands still."""
        assert job.home is not None
        asked = job.seat is not None and job.seat.state is SeatState.WAIT_R
        group = job.home.group
        self.forget(job, now)
        self.wait(job, now, clock_runs=False)
        job.asked = asked
        self._made.append(do.Suspend(job=job.spec.id, group=group))

    def cancel(self, job: Job) -> None:
        self._release(self._reservations.cancel(job))

    def forget(self, job: Job, now: float) -> None:
        for home, seat in ((job.home, job.seat), (job.destination, job.next_seat)):
            if home is None:
                continue
            group = self._cluster.groups[home.group]
            if seat is not None:
                group.seats.remove(seat)
            keep = job.destination if home is job.home else None
            self._release(self._cluster.unpin(job, home, keep=keep))
            if home.group in self._cluster.groups:
                self._permits.rebase(group, now)
        job.home = job.destination = job.seat = job.next_seat = None
        job.token = -1
        job.going = False
        self._queue.urge(job, urgent=False)

    def _release(self, nodes: list[str]) -> None:
        if nodes:
            self._made.append(do.ReleaseNodes(nodes=tuple(nodes)))


def between_iterations(job: Job) -> bool:
    """Whether a job has nodes but runs no phase, so that it may move at once."""
    seat = job.seat
    idle = seat is not None and job.token < 0 and seat.state in (SeatState.WAIT_R, SeatState.IDLE_R)
    return idle and not job.over
