"""Repacking: moves that save money, a few per decision so that no decision takes long."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from itertools import islice
from typing import Literal, NamedTuple

from rollpacker.rollmux.model.cluster import Cluster, CoExecutionGroup, Job
from rollpacker.rollmux.model.settings import Settings
from rollpacker.rollmux.placement.admission import Admission, affordable, expected
from rollpacker.rollmux.placement.placement import Offer, Placement
from rollpacker.rollmux.scheduler.reservations import Reservations

AMORTISED = 20.0  # a job moves only if the rest of it takes at least so many loads
COVERED = 2.5  # loads that the slack of a moving job must cover
LASTS_S = 7200.0  # most seconds for which a better packing is expected to last
TOLL = 2.0  # cost of a load in prices of the job's nodes: it holds both homes and stands still
TRY_EFFORT = 0.1  # of looking for sites
DISSOLVED = 4  # most members of a group that may be dissolved
SWAPPED = 24  # most other groups in which a swap is tried for a job
NEIGHBOURS = 6  # groups that are examined again after a change elsewhere


class RepackStep(NamedTuple):
    """Something to try: a move of a job, or the end of a group.

    Args:
        kind: ``move`` into another group, ``inside`` its own, ``swap`` with a member of another
            one, or
            ``dissolve``.
        group: the group to dissolve, or the last one in which a swap was tried.
        left: number of groups in which a swap is still to be tried.
    """

    kind: Literal["move", "inside", "dissolve", "swap"]
    job: str = ""
    group: int = -1
    left: int = 0


class Repack:
    """A list of moves to try. ``work`` tries some and makes reservations."""

    def __init__(
        self,
        cluster: Cluster,
        settings: Settings,
        admission: Admission,
        placement: Placement,
        moves: Reservations,
    ) -> None:
        self._cluster = cluster
        self._settings = settings
        self._admission = admission
        self._placement = placement
        self._reservations = moves
        self.agenda: OrderedDict[RepackStep, None] = OrderedDict()

    def suggest(self, group: int) -> None:
        """Steps for a changed group and the smallest others: dissolve it, or move its members."""
        if not self._settings.repack:
            return
        self._about(group)
        groups = [g for g in self._cluster.groups.values() if g.id != group and g.seats]
        groups.sort(key=lambda g: (len(g.seats), g.id))
        for other in groups[:NEIGHBOURS]:
            self._about(other.id)

    def everything(self) -> None:
        for number in self._cluster.groups:
            self._about(number)
        for job in self._cluster.jobs.values():
            self._suggest_swaps(job)

    def again(self, job: Job, now: float) -> None:
        """Look at a job again from time to time without an event, since slack grows."""
        if not self._settings.repack or now < job.looked_at + self._settings.look_s:
            return
        job.looked_at = now
        self._suggest_moves(job.spec.id)
        self._suggest_swaps(job)
        if job.home is not None and len(self._cluster.groups[job.home.group].seats) <= DISSOLVED:
            self.agenda.setdefault(RepackStep("dissolve", group=job.home.group))

    def _about(self, number: int) -> None:
        group = self._cluster.groups.get(number)
        if group is None:
            return
        if len(group.seats) <= DISSOLVED:
            self.agenda.setdefault(RepackStep("dissolve", group=number))
        for seat in group.seats:
            self._suggest_moves(seat.job)

    def _suggest_moves(self, job: str) -> None:
        self.agenda.setdefault(RepackStep("move", job))
        self.agenda.setdefault(RepackStep("inside", job))

    def _suggest_swaps(self, job: Job) -> None:
        if job.home is not None:
            self.agenda.setdefault(RepackStep("swap", job.spec.id, job.home.group, SWAPPED))

    def work(self, now: float) -> list[Job]:
        """Try steps within the effort budget. Returns jobs that got a reservation."""
        reserved: list[Job] = []
        while self.agenda and self._admission.left > 0:
            task, _ = self.agenda.popitem(last=False)
            self._admission.left -= TRY_EFFORT
            attempt = self._dissolve if task.kind == "dissolve" else self._move
            reserved += attempt(task, now)
        return reserved

    def _move(self, task: RepackStep, now: float) -> list[Job]:
        job = self._cluster.jobs.get(task.job)
        if job is None or not self._worth(job, now):
            return []
        if task.kind == "swap":
            return self._swap(task, job, now)
        assert job.home is not None
        group = self._cluster.groups[job.home.group]
        value = self._placement.value(group, now)
        if task.kind == "inside":
            offer = self._placement.inside(job, now, below=value - self._toll(job))
        else:
            saving = value - self._placement.value(group, now, (job.spec.id,))
            avoid = (job.home.group,)
            offer = self._placement.best(job, now, below=saving - self._toll(job), avoid=avoid)
        if offer is None:
            return []
        self._reservations.reserve(job, offer.site)
        return [job]

    def _swap(self, task: RepackStep, job: Job, now: float) -> list[Job]:
        """Try to swap a job with members of other groups. A later decision continues."""
        assert job.home is not None
        numbers = sorted(self._cluster.groups)
        numbers = numbers[bisect_right(numbers, task.group) :] + numbers
        for tried, number in enumerate(islice(numbers, task.left)):
            if number == job.home.group:
                break
            if self._admission.left <= 0:
                rest = RepackStep("swap", task.job, number - 1, task.left - tried)
                self.agenda[rest] = None
                self.agenda.move_to_end(rest, last=False)
                break
            moved = self._swap_with(job, self._cluster.groups[number], now)
            if moved:
                return moved
        return []

    def _swap_with(self, job: Job, group: CoExecutionGroup, now: float) -> list[Job]:
        assert job.home is not None
        mine = self._cluster.groups[job.home.group]
        before = self._placement.value(mine, now) + self._placement.value(group, now)
        rest = self._placement.value(mine, now, (job.spec.id,))
        for other in self._cluster.members(group):
            if self._admission.left <= 0:
                break
            if other.home is None or other.home.group != group.id or not self._worth(other, now):
                continue
            names = (job.spec.id, other.spec.id)
            limit = before - self._toll(job) - self._toll(other)
            self._admission.left -= TRY_EFFORT
            offer = self._placement.instead(job, group, now, of=names[1], below=limit)
            if offer is None:
                continue
            left = limit - offer.cost
            back = self._placement.instead(other, mine, now, of=names[0], below=left)
            away = self._placement.best(
                other,
                now,
                below=min(left if back is None else back.cost, left) - rest,
                avoid=(mine.id, group.id),
            )
            chosen = back if away is None else away
            if chosen is not None and self._reserve_both((job, offer), (other, chosen)):
                return [job, other]
        return []

    def _reserve_both(self, *moves: tuple[Job, Offer]) -> bool:
        """Reserve both, unless the first takes free nodes that the second needs."""
        (job, offer), (other, its) = moves
        self._reservations.reserve(job, offer.site)
        if not self._placement.still(its.site, other):
            self._reservations.cancel(job)
            return False
        self._reservations.reserve(other, its.site)
        return True

    def _dissolve(self, task: RepackStep, now: float) -> list[Job]:
        group = self._cluster.groups.get(task.group)
        jobs = [] if group is None else self._cluster.members(group)
        if group is None or not all(self._worth(job, now) for job in jobs):
            return []
        left = self._placement.value(group, now) - sum(self._toll(job) for job in jobs)
        jobs.sort(key=lambda job: -sum(expected(job)))
        moved: list[Job] = []
        for job in jobs:
            offer = self._placement.best(job, now, below=left, avoid=(group.id,))
            if offer is None:
                for each in reversed(moved):
                    self._reservations.cancel(each)
                return []
            left -= offer.cost
            self._reservations.reserve(job, offer.site)
            moved.append(job)
        return moved

    def _toll(self, job: Job) -> float:
        rest = job.remaining() * sum(expected(job))
        share = TOLL * self._settings.cold_s / min(rest, LASTS_S)
        return share * self._settings.prices.of(job.spec.gangs)

    def _worth(self, job: Job, now: float) -> bool:
        if job.destination is not None or job.home is None or job.over or job.held:
            return False
        rest = job.remaining() * sum(expected(job))
        cold = self._settings.cold_s
        spare = (affordable(job, now) - 1.0) * rest
        return rest > AMORTISED * cold and spare > COVERED * cold
