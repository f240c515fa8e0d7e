"""The scheduler: events in, decisions out. The daemon and the simulation drive this class."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from msgspec.structs import replace

from rollpacker.rollmux.model import decisions as do
from rollpacker.rollmux.model import events as ev
from rollpacker.rollmux.model.cluster import Cluster, Job
from rollpacker.rollmux.model.inventory import POOL_NAMES, Cloud, Fixed, Inventory
from rollpacker.rollmux.model.jobs import KNOWN_AFTER
from rollpacker.rollmux.model.seat import IDLE, Seat
from rollpacker.rollmux.model.settings import Settings
from rollpacker.rollmux.placement.admission import Admission, expected
from rollpacker.rollmux.placement.placement import Placement, Site
from rollpacker.rollmux.scheduler.assignments import Assignments
from rollpacker.rollmux.scheduler.maintenance import Maintenance
from rollpacker.rollmux.scheduler.permits import Permits
from rollpacker.rollmux.scheduler.queue import Choose, Queue, why_never
from rollpacker.rollmux.scheduler.repack import Repack
from rollpacker.rollmux.scheduler.reservations import Reservations
from rollpacker.rollmux.scheduler.slo_guard import SloGuard
from rollpacker.rollmux.scheduler.snapshot import SchedulerSnapshot

FEW = 6  # up to so many groups, an arriving job tries all of them


def nodes_of(settings: Settings) -> Inventory:
    """A new inventory: rented nodes, or named ones that join later."""
    if settings.nodes == "named":
        return Fixed()
    return Cloud(settings.memory_cap_gb, settings.limit)


class Scheduler:
    """Places jobs in groups, hands out permits, repacks and guards SLOs. Other jobs wait.

    Args:
        inventory: the nodes (None for an empty inventory by ``settings``).
        choose: chooses nodes for a waiting job (None for the cheapest site that keeps all SLOs).
    """

    def __init__(
        self,
        settings: Settings,
        inventory: Inventory | None = None,
        choose: Choose | None = None,
    ) -> None:
        self.settings = settings
        self.cluster = cluster = Cluster(inventory or nodes_of(settings))
        self.admission = Admission(cluster, settings)
        self.placement = Placement(cluster, settings, self.admission)
        self._made: list[do.Decision] = []
        self._choose = choose or self._cheapest
        self.queue = Queue(cluster, settings, self._choose)
        self._permits = Permits(cluster, settings, self._made)
        self._reservations = Reservations(cluster, self.admission)
        self._assignments = Assignments(
            cluster, settings, self._reservations, self._permits, self.queue, self._made
        )
        self._repack = Repack(cluster, settings, self.admission, self.placement, self._reservations)
        self._guard = SloGuard(cluster, settings, self.admission)
        self._maintenance = Maintenance(cluster, self.placement, self._reservations)

    def handle(self, now: float, event: ev.Event) -> list[do.Decision]:
        """Handle one event. Carry out the returned decisions in their order.

        Raises ``ValueError`` on an impossible event. Nothing has changed then.
        """
        self._made.clear()
        self.admission.refill()
        _HANDLERS[type(event)](self, now, event)
        self._permits.hand_out(now)
        return list(self._made)

    def next_look(self) -> float:
        """Time for ``TimePassed`` if nothing happens before (``seat.NEVER`` for never)."""
        return min(self._permits.timers.next(), self.queue.retry_at)

    def number_from(self, token: int) -> None:
        """The next permit has at least this number."""
        self._permits.token = max(self._permits.token, token)

    def snapshot(self) -> SchedulerSnapshot:
        """All state on which later decisions depend. It shares objects with the scheduler."""
        return SchedulerSnapshot(
            jobs=list(self.cluster.jobs.values()),
            groups=list(self.cluster.groups.values()),
            nodes=list(self.cluster.nodes.values()),
            inventory=self.cluster.inventory.state_dict(),
            reservation=self.cluster.reservation,
            retry_at=self.queue.retry_at,
            number=self.cluster.number,
            token=self._permits.token,
            agenda=list(self._repack.agenda),
            looks=self._permits.timers.times(),
            rehearsed=list(self.admission.rehearsed.values()),
        )

    def restore(self, saved: SchedulerSnapshot) -> None:
        """Restore a snapshot into a new scheduler with the same settings."""
        saved.restore(self.cluster)
        self._permits.token = saved.token
        self.queue.restore(saved.retry_at)
        self._repack.agenda.update(dict.fromkeys(saved.agenda))
        self.admission.rehearsed |= {each.members: each for each in saved.rehearsed}
        self._permits.timers.restore(saved.looks)

    def _cheapest(self, job: Job, now: float) -> Site | None:
        alone = self.placement.isolated(job, now)
        few = len(self.cluster.groups) <= FEW
        below = inf if alone is None else alone.price
        offer = self.placement.best(job, now, below=below, thorough=few)
        return alone if offer is None else offer.site

    def _arrived(self, now: float, event: ev.JobArrived) -> None:
        spec = event.spec
        if spec.id in self.cluster.jobs:
            raise ValueError(f"job {spec.id}: this id is in use")
        job = Job(spec, now, submitted=now, looked_at=now, programs=event.programs)
        why = why_never(self.cluster.inventory, job)
        if why is not None and spec.too_large == "refuse":
            raise ValueError(f"job {spec.id}: {why}")
        self.cluster.jobs[spec.id] = job
        self._assignments.wait(job, now, clock_runs=spec.slo_since == "submission")
        self._serve(now)
        if job.waits_since is not None:
            self._made.append(do.Wait(job=spec.id))

    def _changed(self, now: float, event: ev.JobChanged) -> None:
        job = self.cluster.jobs.get(event.job)
        if job is None:
            return
        if event.priority is not None:
            job.spec = replace(job.spec, priority=event.priority)
        if event.held is not None:
            job.hold(event.held, now)
        if job.held and job.waits_since is None:
            self.queue.urge(job, urgent=False)
            if job.destination is not None and not job.going:
                self._assignments.cancel(job)
            self._assignments.suspend_if_idle(job, now)
        self._serve(now)
        self._rearrange(now)

    def _serve(self, now: float) -> None:
        """Nodes may have become free: serve waiting jobs, and reclaim borrowed nodes."""
        for name in sorted(self.queue.urgent):
            job = self.cluster.jobs[name]
            if job.destination is not None:
                self.queue.urge(job, urgent=False)
            elif (site := self.placement.isolated(job, now, at_once=True)) is not None:
                self._reservations.reserve(job, site)
                self.queue.urge(job, urgent=False)
                self._assignments.begin_if_idle(job, now, "guard")
        if not self.queue.jobs:
            return
        for job, site in self.queue.offers(now):
            self._assignments.admit(job, site, now)
        for job in self.queue.to_reclaim():
            job.leaves = True
            if job.destination is None:
                self._assignments.suspend_if_idle(job, now)

    def _time_passed(self, now: float, _: ev.TimePassed) -> None:
        self._permits.time_passed(now)
        self._serve(now)
        self._rearrange(now)

    def _requested(self, _: float, event: ev.PermitRequested) -> None:
        job = self.cluster.jobs.get(event.job)
        if job is None:
            return
        if job.going or job.waits_since is not None:
            job.asked = True
            return
        seat, home = job.seat, job.home
        assert seat is not None
        assert home is not None
        pool = POOL_NAMES.index(event.phase)
        if seat.state is IDLE[pool]:
            seat.ask()
            self._permits.touch(home.group)

    def _finished(self, now: float, event: ev.PhaseFinished) -> None:
        job = self.cluster.jobs.get(event.job)
        if job is None or job.token != event.token or job.seat is None or job.home is None:
            return
        job.token = -1
        job.seat.finish(POOL_NAMES.index(event.phase), now, now + self.settings.cold_s)
        self._permits.touch(job.home.group)
        if event.phase == "rollout":
            job.rollout_s = event.seconds
            return
        self._iterated(job, job.seat, event.seconds)
        if job.over:
            return
        self._leave(job, now)
        if job.observed.count == KNOWN_AFTER and job.home is not None:
            self._repack.suggest(job.home.group)
            self._serve(now)
        else:
            self._repack.again(job, now)
        self._rearrange(now)

    def _leave(self, job: Job, now: float) -> None:
        """After an iteration, start the pending move, suspension or eviction of a job."""
        assert job.seat is not None
        if job.destination is not None:
            self.queue.urge(job, urgent=False)
            self._assignments.begin(
                job, now, "drain" if self._maintenance.to_empty(job) else "repack"
            )
        elif job.leaves:
            self._assignments.suspend(job, now)
            self._serve(now)
        elif self.settings.lifetime and self._guard.must_leave(job, now):
            site = self.placement.isolated(job, now, at_once=True) or self._elsewhere(job, now)
            self.queue.urge(job, urgent=site is None)
            if site is None:
                self._leave_alone(job, now)
            if site is not None:
                self._reservations.reserve(job, site)
                self._assignments.begin(job, now, "guard")
        elif self.settings.lifetime:
            job.seat.go_alone(False)
            self.queue.urge(job, urgent=self.admission.few and self._guard.crowded(job, now))

    def _leave_alone(self, job: Job, now: float) -> None:
        """Make other jobs on its nodes wait, except those whose SLOs are in danger too."""
        assert job.home is not None
        for seat in self.cluster.groups[job.home.group].seats:
            other = self.cluster.jobs[seat.job]
            if other is job or (not seat.alone and self._guard.must_leave(other, now)):
                seat.go_alone(True)

    def _elsewhere(self, job: Job, now: float) -> Site | None:
        assert job.home is not None
        offer = self.placement.best(job, now, below=inf, avoid=(job.home.group,), thorough=True)
        return None if offer is None else offer.site

    def _iterated(self, job: Job, seat: Seat, train_s: float) -> None:
        solo_s = job.rollout_s + train_s
        job.observed.add(job.rollout_s, train_s)
        job.done += 1
        job.solo_s += solo_s
        seat.learn(solo_s, expected(job))
        assert job.home is not None
        self.cluster.changed.add(job.home.group)

    def _rearrange(self, now: float) -> None:
        for job in self._maintenance.move_out(now):
            self._assignments.begin_if_idle(job, now, "drain")
        for job in self._repack.work(now):
            self._assignments.begin_if_idle(job, now, "repack")

    def _moved(self, now: float, event: ev.MoveFinished) -> None:
        job = self.cluster.jobs.get(event.job)
        if job is None or not job.going:
            return
        old = job.home
        self._assignments.arrive(job, now)
        if job.held:
            self._assignments.suspend_if_idle(job, now)
        if old is not None and old.group in self.cluster.groups:
            self._repack.suggest(old.group)
        self._serve(now)

    def _tail(self, _: float, event: ev.TailReached) -> None:
        job = self.cluster.jobs.get(event.job)
        if job is not None and job.home is not None and job.token >= 0:
            job.tail_reached = job.leaves_tails = True
            self._permits.touch(job.home.group)

    def _lost(self, now: float, event: ev.PermitLost) -> None:
        job = self.cluster.jobs.get(event.job)
        if job is None or job.token != event.token or job.seat is None or job.home is None:
            return
        job.token = -1
        job.seat.lose()
        self._permits.touch(job.home.group)
        if job.leaves and job.destination is None:
            self._assignments.suspend_if_idle(job, now)
            self._serve(now)

    def _ended(self, now: float, event: ev.JobEnded) -> None:
        job = self.cluster.jobs.get(event.job)
        if job is None:
            return
        home = job.home or job.destination
        group = None if home is None else home.group
        if group is None:
            self.queue.take(job, now)
        self._assignments.forget(job, now)
        del self.cluster.jobs[event.job]
        self._made.append(do.Depart(job=event.job, group=group))
        self._serve(now)
        if group is not None:
            self._repack.suggest(group)
        self._rearrange(now)

    def _failed(self, now: float, event: ev.NodeFailed) -> None:
        node = self.cluster.nodes.get(event.node)
        self._maintenance.failed(now, event)
        if node is None:
            return
        node.held = False
        stranded: list[Job] = []
        for job in [self.cluster.jobs[name] for name in list(node.pins)]:
            stays = job.home is None or event.node not in job.home.names
            if job.destination is not None and not job.going and stays:
                self._assignments.cancel(job)
            else:
                self._assignments.forget(job, now)
                stranded.append(job)
        # Only now: a group keeps its dead node while any job is pinned there.
        for job in stranded:
            self._assignments.wait(job, now, clock_runs=not job.held)
            job.stranded = True
        self._serve(now)
        for job in stranded:
            if job.waits_since is not None:
                self._made.append(do.Wait(job=job.spec.id))

    def _node_joined(self, now: float, event: ev.NodeJoined) -> None:
        self._maintenance.joined(now, event)
        self._serve(now)
        self._rearrange(now)

    def _heard(self, now: float, event: ev.AgentHeard) -> None:
        self._maintenance.heard(event)
        self._serve(now)
        self._rearrange(now)

    def _node_closed(self, now: float, event: ev.NodeClosed) -> None:
        self._maintenance.closed(now, event)
        for job in self._maintenance.bound_for(event.node):
            self._assignments.cancel(job)
        self._rearrange(now)

    def _node_opened(self, now: float, event: ev.NodeOpened) -> None:
        self._maintenance.opened(now, event)
        self._serve(now)
        self._rearrange(now)

    def _node_removed(self, _: float, event: ev.NodeRemoved) -> None:
        self._maintenance.removed(event)


_HANDLERS: dict[type, Callable[..., None]] = {
    ev.JobArrived: Scheduler._arrived,
    ev.JobChanged: Scheduler._changed,
    ev.PermitRequested: Scheduler._requested,
    ev.TailReached: Scheduler._tail,
    ev.PhaseFinished: Scheduler._finished,
    ev.PermitLost: Scheduler._lost,
    ev.MoveFinished: Scheduler._moved,
    ev.JobEnded: Scheduler._ended,
    ev.NodeFailed: Scheduler._failed,
    ev.NodeJoined: Scheduler._node_joined,
    ev.AgentHeard: Scheduler._heard,
    ev.NodeClosed: Scheduler._node_closed,
    ev.NodeOpened: Scheduler._node_opened,
    ev.NodeRemoved: Scheduler._node_removed,
    ev.TimePassed: Scheduler._time_passed,
}
