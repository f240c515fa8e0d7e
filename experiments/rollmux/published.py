"""The published algorithm, under the rules of ``ClusterSimulation``, on rented nodes.

Turns in a group are strict. A job is planned at its worst case all its life, and joins the cheapest
group whose exact cycle stays under every member's limit. With another ``rule`` for where a job goes
it is the baselines that share nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from operator import or_

import numpy as np

from rollpacker.rollmux.model import decisions as do
from rollpacker.rollmux.model import events as ev
from rollpacker.rollmux.model.cluster import Cluster, CoExecutionGroup, Job
from rollpacker.rollmux.model.inventory import POOL_NAMES, Cloud
from rollpacker.rollmux.model.seat import (
    IDLE,
    NEVER,
    POOLS,
    ROLLOUT,
    RUNNING,
    TRAIN,
    WAITING,
    Seat,
    SeatState,
)
from rollpacker.rollmux.model.settings import Settings
from rollpacker.rollmux.model.tail_model import TAIL_COST
from rollpacker.rollmux.placement.admission import Admission, expected
from rollpacker.rollmux.placement.group_table import node_loads
from rollpacker.rollmux.placement.permit_order import bits, load_bound
from rollpacker.rollmux.placement.placement import Placement, Site
from rollpacker.rollmux.scheduler.reservations import Reservations

Rule = Callable[[Sequence[Site], Cluster], Site | None]
"""Picks one of the sites on existing nodes; None for nodes of its own."""


def most_idle(sites: Sequence[Site], cluster: Cluster) -> Site:
    """Greedy: the site whose busiest node has the least to do."""

    def busiest(site: Site) -> float:
        assert site.group is not None
        group = cluster.groups[site.group]
        return max(node_loads(group, p)[name] for p in (0, 1) for name in site.nodes[p])

    return min(sites, key=busiest)


def at_random(rng: np.random.Generator) -> Rule:
    """Any existing nodes, or its own, with equal chances."""

    def rule(sites: Sequence[Site], _: Cluster) -> Site | None:
        number = int(rng.integers(len(sites) + 1))
        return sites[number] if number < len(sites) else None

    return rule


def formula_holds(members: Sequence[Seat]) -> bool:
    """Whether rollout sets are equal or disjoint and there is one shared training unit."""
    if len({seat.masks[TRAIN] for seat in members}) > 1:
        return False
    masks = {seat.masks[ROLLOUT] for seat in members}
    return sum(mask.bit_count() for mask in masks) == reduce(or_, masks, 0).bit_count()


def cycle(members: Sequence[Seat]) -> float:
    """Seconds of a meta-iteration under round-robin in this order, exactly."""
    return load_bound(members) if formula_holds(members) else max_plus_cycle(members)


def max_plus_cycle(members: Sequence[Seat]) -> float:
    """The growth rate of the max-plus recursion: Karp's maximum cycle mean."""
    step = _one_round(members)
    size = len(step)
    walks = [np.zeros(size)]
    for _ in range(size):
        walks.append(np.max(step + walks[-1][None, :], axis=1))
    lengths = np.arange(size, 0, -1)[:, None]
    with np.errstate(invalid="ignore"):
        means = (walks[size][None, :] - np.array(walks[:size])) / lengths
    return float(np.max(np.min(means, axis=0)))


def _one_round(members: Sequence[Seat]) -> np.ndarray:
    """``A`` in ``ends' = A ⊗ ends``; ends of all rollouts, then of all trainings."""
    count = len(members)
    now = np.full((2 * count, 2 * count), -np.inf)
    np.fill_diagonal(now, 0.0)
    fresh = now.copy()
    for pool in POOLS:
        last: dict[int, int] = {}
        for index in reversed(range(count)):
            for bit in bits(members[index].masks[pool]):
                last.setdefault(bit, index)
        for index, seat in enumerate(members):
            own = now[count + index] if pool == ROLLOUT else fresh[index]
            ready = own.copy()
            for bit in bits(seat.masks[pool]):
                before = last[bit]
                rows = fresh if before < index else now
                ready = np.maximum(ready, rows[pool * count + before])
                last[bit] = index
            fresh[pool * count + index] = ready + seat.seconds(pool)
    return fresh


_BEGUN = {
    SeatState.RUN_T: (1, 1),
    SeatState.WAIT_T: (1, 0),
    SeatState.IDLE_T: (1, 0),
    SeatState.RUN_R: (1, 0),
}
"""Rounds of either phase that a member has begun when rounds count from zero again."""


class Turns:
    """Round-robin: strictly by (round, position) on every node; nobody passes a member that it
    shares one with."""

    def __init__(self) -> None:
        self._rounds: dict[Seat, list[int]] = {}
        self.out: set[Seat] = set()
        """Members that have no turns any more, since all their iterations are done."""

    def begin(self, group: CoExecutionGroup) -> list[Seat]:
        """Rounds count from zero again. Returns the members by position."""
        members = [seat for seat in group.seats if seat not in self.out]
        members.sort(key=lambda seat: seat.progress)
        for position, seat in enumerate(members):
            seat.order(position)
            self._rounds[seat] = list(_BEGUN.get(seat.state, (0, 0)))
        return members

    def take(self, seat: Seat, pool: int) -> None:
        self._rounds[seat][pool] += 1

    def _turn(self, seat: Seat, pool: int) -> tuple[int, int]:
        return self._rounds.setdefault(seat, [0, 0])[pool], seat.position

    def next(self, seats: Sequence[Seat], pool: int) -> Seat | None:
        """Whom to permit next on a pool."""
        taken = 0
        for seat in seats:
            if seat.state is RUNNING[pool]:
                taken |= seat.busy
        best: Seat | None = None
        for seat in seats:
            mask = seat.masks[pool]
            if seat.state is not WAITING[pool] or mask & taken:
                continue
            turn = self._turn(seat, pool)
            if best is not None and self._turn(best, pool) < turn:
                continue
            if not any(
                other.masks[pool] & mask and self._turn(other, pool) < turn
                for other in seats
                if other is not seat and other not in self.out
            ):
                best = seat
        return best


class Published:
    """A scheduler for ``ClusterSimulation``.

    Args:
        rule: for where a job goes; None for the published one.
    """

    def __init__(self, rule: Rule | None = None) -> None:
        self.settings = settings = Settings(repack=False)
        self.cluster = cluster = Cluster(Cloud(settings.memory_cap_gb))
        self.admission = Admission(cluster, settings)
        self.placement = Placement(cluster, settings, self.admission)
        self._reservations = Reservations(cluster, self.admission)
        self._turns = Turns()
        self._rule = rule
        self._token = 0
        self._touched: dict[int, None] = {}
        self._made: list[do.Decision] = []

    def next_look(self) -> float:
        return NEVER

    def handle(self, now: float, event: ev.Event) -> list[do.Decision]:
        self._made = []
        match event:
            case ev.JobArrived():
                self._arrived(event, now)
            case ev.PermitRequested():
                self._requested(event)
            case ev.TailReached():
                self._tail(event)
            case ev.PhaseFinished():
                self._finished(event, now)
            case ev.JobEnded():
                self._ended(event, now)
            case _:
                raise ValueError(f"the published algorithm has no {type(event).__name__}")
        for number in list(self._touched):
            if (group := self.cluster.groups.get(number)) is not None:
                self._dispatch(group, now)
        self._touched.clear()
        return self._made

    def _arrived(self, event: ev.JobArrived, now: float) -> None:
        job = Job(event.spec, now, submitted=now, looked_at=now)
        self.cluster.jobs[event.spec.id] = job
        site = self._ruled(job, now) if self._rule else self._first_admitted(job, now)
        self._reservations.reserve(job, site)
        self._made += self._reservations.take(job, NEVER)
        assert job.home is not None
        self._rebase(self.cluster.groups[job.home.group], now)

    def _own(self, job: Job, now: float) -> Site:
        site = self.placement.isolated(job, now)
        assert site is not None
        return site

    def _ruled(self, job: Job, now: float) -> Site:
        assert self._rule is not None
        sites = [
            site
            for group in self.cluster.groups.values()
            if len(group.seats) < self.settings.group_size
            for site in self.placement.sites(job, group, (0.0, 0.0), now=now)
            if site.fresh == (0, 0)
        ]
        found = self._rule(sites, self.cluster) if sites else None
        return found or self._own(job, now)

    def _first_admitted(self, job: Job, now: float) -> Site:
        """The cheapest that is admitted, of these the busiest."""
        alone = self._own(job, now)
        table, groups = self.placement.table, self.cluster.groups
        table.refresh()
        rollout_s, train_s = expected(job)
        period = job.spec.slo * (rollout_s + train_s)
        loads = rollout_s / period, train_s / period
        found = [
            site
            for number in table.scan(job.spec.gangs, loads, self.settings)
            for site in self.placement.sites(job, groups[number], loads, now=now)
            if site.price < alone.price - 1e-9
        ]
        found.sort(key=lambda site: (site.price, -site.score))
        return next((site for site in found if self._admitted(site, job)), alone)

    def _admitted(self, site: Site, job: Job) -> bool:
        seats, _ = self.placement.joined(site, job)
        return self.within_limits(seats)

    def within_limits(self, seats: Sequence[Seat]) -> bool:
        """Whether the exact cycle stays under every member's limit."""
        jobs = self.cluster.jobs
        return cycle(seats) <= min(jobs[s.job].spec.slo * (s.r + s.t) for s in seats)

    def _rebase(self, group: CoExecutionGroup, now: float) -> None:
        group.epoch += 1
        self.cluster.changed.add(group.id)
        self._touched[group.id] = None
        members = self._turns.begin(group)
        for seat in members:
            seat.promise(self.cluster.jobs[seat.job].spec.slo, since=now)
        order = tuple(seat.job for seat in members)
        self._made.append(do.Rebase(group=group.id, epoch=group.epoch, order=order))

    def _seat(self, name: str) -> tuple[Job, Seat, CoExecutionGroup]:
        job = self.cluster.jobs[name]
        assert job.seat is not None
        assert job.home is not None
        return job, job.seat, self.cluster.groups[job.home.group]

    def _requested(self, event: ev.PermitRequested) -> None:
        _, seat, group = self._seat(event.job)
        if seat.state is IDLE[POOL_NAMES.index(event.phase)]:
            seat.ask()
            self._touched[group.id] = None

    def _tail(self, event: ev.TailReached) -> None:
        job, _, group = self._seat(event.job)
        if job.token >= 0:
            job.tail_reached = True
            self._touched[group.id] = None

    def _finished(self, event: ev.PhaseFinished, now: float) -> None:
        job, seat, group = self._seat(event.job)
        job.token = -1
        seat.finish(POOL_NAMES.index(event.phase), now)
        self._touched[group.id] = None
        if event.phase == "rollout":
            job.rollout_s = event.seconds
            return
        job.done += 1
        seat.learn(job.rollout_s + event.seconds, expected(job))
        self.cluster.changed.add(group.id)
        if job.over:
            self._turns.out.add(seat)
            seat.order(len(group.seats))
            self._rebase(group, now)

    def _ended(self, event: ev.JobEnded, now: float) -> None:
        job, seat, group = self._seat(event.job)
        assert job.home is not None
        group.seats.remove(seat)
        self._turns.out.discard(seat)
        if freed := self.cluster.unpin(job, job.home):
            self._made.append(do.ReleaseNodes(nodes=tuple(freed)))
        if group.id in self.cluster.groups:
            self._rebase(group, now)
        del self.cluster.jobs[event.job]
        self._made.append(do.Depart(job=event.job, group=group.id))

    def _dispatch(self, group: CoExecutionGroup, now: float) -> None:
        for pool in (TRAIN, ROLLOUT):
            self._grant(group, pool, now)
        released = list(self._nearly_over(group.seats))
        for job, seat in released:
            assert job.home is not None
            seat.leave_to_tail(TAIL_COST)
            self._made.append(do.ReleaseTail(job=job.spec.id, nodes=job.home.nodes[0]))
        if released:
            self._grant(group, ROLLOUT, now)

    def _nearly_over(self, seats: Sequence[Seat]) -> Iterator[tuple[Job, Seat]]:
        """Rollouts that have reached their tails and whose nodes somebody waits for."""
        waiting = tails = 0
        for seat in seats:
            if seat.state is SeatState.WAIT_R:
                waiting |= seat.masks[ROLLOUT]
            elif seat.state is SeatState.RUN_R and not seat.busy:
                tails |= seat.masks[ROLLOUT]
        for seat in seats:
            job = self.cluster.jobs[seat.job]
            running = seat.state is SeatState.RUN_R and job.tail_reached
            if running and seat.busy & waiting and not seat.busy & tails:
                tails |= seat.busy
                yield job, seat

    def _grant(self, group: CoExecutionGroup, pool: int, now: float) -> None:
        while (seat := self._turns.next(group.seats, pool)) is not None:
            job = self.cluster.jobs[seat.job]
            assert job.home is not None
            seat.start(pool, now)
            self._turns.take(seat, pool)
            job.token, job.tail_reached = self._token, False
            self._token += 1
            self._made.append(
                do.Permit(
                    job=seat.job,
                    phase=POOL_NAMES[pool],
                    token=job.token,
                    group=group.id,
                    epoch=group.epoch,
                    position=seat.position,
                    nodes=job.home.nodes[pool],
                )
            )
