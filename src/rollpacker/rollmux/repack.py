"""Repacking: moves that save money, tried a few at a time so that no decision takes long."""

from __future__ import annotations

from collections import deque
from typing import Literal

from rollpacker.rollmux.admission import Admission, affordable, expected
from rollpacker.rollmux.cluster import POOLS, Cluster, Job
from rollpacker.rollmux.moves import Moves
from rollpacker.rollmux.placement import Placement
from rollpacker.rollmux.settings import Settings

Kind = Literal["move", "inside", "dissolve"]

AMORTISED = 20.0
"""A job moves only if what is left of it is so many loads long."""
COVERED = 2.5
"""Loads that a mover's slack has to cover."""
NEIGHBOURS = 12
"""Groups that are looked at again after a change somewhere else."""


class Repack:
    """A list of things to try; ``work`` tries some and makes reservations."""

    def __init__(
        self,
        cluster: Cluster,
        settings: Settings,
        admission: Admission,
        placement: Placement,
        moves: Moves,
    ) -> None:
        self._cluster = cluster
        self._settings = settings
        self._admission = admission
        self._placement = placement
        self._moves = moves
        self.agenda: deque[tuple[Kind, str]] = deque()
        self._looked: dict[int, float] = {}

    def suggest(self, group: int) -> None:
        """A group changed: it may be dissolved, or its neighbours may move into it."""
        if not self._settings.repack:
            return
        self._about(group)
        groups = [g for g in self._cluster.groups.values() if g.id != group and g.seats]
        groups.sort(key=lambda g: (len(g.seats), g.id))
        for other in groups[:NEIGHBOURS]:
            self._about(other.id)

    def again(self, group: int, now: float) -> None:
        """Once in a while a group is looked at though nothing happened: slack grows."""
        if self._settings.repack and now - self._looked.get(group, -1e9) > self._settings.look_s:
            self._looked[group] = now
            self._about(group)

    def _about(self, number: int) -> None:
        group = self._cluster.groups.get(number)
        if group is None:
            return
        if len(group.seats) <= 4:
            self._add("dissolve", str(number))
        for seat in group.seats:
            self._add("move", seat.job)
            self._add("inside", seat.job)

    def _add(self, kind: Kind, name: str) -> None:
        if (kind, name) not in self.agenda:
            self.agenda.append((kind, name))

    def work(self, now: float) -> list[Job]:
        """Try what is on the list, within the budget. Returns jobs that got a reservation."""
        reserved: list[Job] = []
        while self.agenda and self._admission.left > 0:
            kind, name = self.agenda.popleft()
            if kind == "dissolve":
                reserved += self._dissolve(int(name), now)
            elif (job := self._cluster.jobs.get(name)) is not None:
                reserved += self._move(job, now, kind)
        return reserved

    def _move(self, job: Job, now: float, kind: Kind) -> list[Job]:
        saving = self._own_price(job)
        if saving <= 0 or not self._worth(job, now):
            return []
        assert job.home is not None
        site = (
            self._placement.inside(job, now, below=saving)
            if kind == "inside"
            else self._placement.best(job, now, below=saving, avoid=(job.home.group,))
        )
        if site is None:
            return []
        self._moves.reserve(job, site)
        return [job]

    def _dissolve(self, number: int, now: float) -> list[Job]:
        group = self._cluster.groups.get(number)
        jobs = [] if group is None else self._cluster.members(group)
        if group is None or not all(self._worth(job, now) for job in jobs):
            return []
        left = self._placement.price((len(group.nodes[0]), len(group.nodes[1])))
        jobs.sort(key=lambda job: -sum(expected(job, self._settings)))
        moved: list[Job] = []
        for job in jobs:
            site = self._placement.best(job, now, below=left, avoid=(number,))
            if site is None:
                self._roll_back(moved)
                return []
            left -= site.price
            self._moves.reserve(job, site)
            moved.append(job)
        return moved

    def _roll_back(self, moved: list[Job]) -> None:
        for job in reversed(moved):
            self._moves.cancel(job)

    def _worth(self, job: Job, now: float) -> bool:
        """Whether a move pays and the job can afford it."""
        if job.leaving is not None or job.home is None:
            return False
        rest = job.remaining() * sum(expected(job, self._settings))
        cold = self._settings.cold_s
        spare = (affordable(job, now, self._settings, 0.0) - 1.0) * rest
        return rest > AMORTISED * cold and spare > COVERED * cold

    def _own_price(self, job: Job) -> float:
        """Dollars per hour of the nodes that only this job is pinned on."""
        if job.home is None:
            return 0.0
        own = [
            sum(len(self._cluster.nodes[name].pins) == 1 for name in job.home.nodes[pool])
            for pool in POOLS
        ]
        return self._placement.price((own[0], own[1]))


