"""May these jobs share these nodes? The slowdown that a job can afford, and the exact test."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from rollpacker.rollmux import interleave as il
from rollpacker.rollmux.cluster import POOLS, Cluster, Group, Home, Job
from rollpacker.rollmux.interleave import Seat
from rollpacker.rollmux.settings import Settings

Masks = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Joiner:
    """A job that might join a group, on nodes given as masks and stretched so far."""

    job: Job
    masks: Masks
    stretch: tuple[float, float] = (1.0, 1.0)


def expected(job: Job, settings: Settings) -> tuple[float, float]:
    """Rollout and training seconds to plan with: observed once known, else the worst case."""
    if settings.learn and job.observed.known:
        return job.observed.means
    return job.spec.worst_rollout_s, job.spec.worst_train_s


def affordable(job: Job, now: float, settings: Settings, reserve_s: float) -> float:
    """The slowdown at which the rest of a job's life uses up its lifetime budget.

    ``slo * (seconds alone, done and to come)`` less what has passed and a reserve, spread over
    what is to come: slack that was banked may be spent.
    """
    if not settings.lifetime:
        return job.spec.slo
    rest = job.remaining() * sum(expected(job, settings))
    budget = job.spec.slo * (job.solo_s + rest) - (now - job.started) - reserve_s
    return budget / rest


def stretch_of(job: Job, home: Home) -> tuple[float, float]:
    """How much longer the phases take on fewer nodes than asked for."""
    rollout, train = job.gangs()
    return rollout / len(home.nodes[0]), train / len(home.nodes[1])


class Admission:
    """The exact test, with a budget of rehearsals for each decision."""

    def __init__(self, cluster: Cluster, settings: Settings) -> None:
        self._cluster = cluster
        self._settings = settings
        self._order = (
            il.round_robin if settings.permits == "round_robin" else il.earliest_deadline
        )
        self.left = settings.rehearsals

    def refill(self) -> None:
        """A new decision begins."""
        self.left = self._settings.rehearsals

    def seat(self, job: Job, masks: Masks, stretch: tuple[float, float]) -> Seat:
        """A seat with what is expected of a job; its target is still to be set."""
        r, t = expected(job, self._settings)
        return Seat(job.spec.id, masks, r, t, stretch=stretch)

    def admits(
        self,
        group: Group | None,
        now: float,
        joiners: Iterable[Joiner],
        without: Collection[str] = (),
    ) -> bool:
        """Whether a group keeps all its promises with the joiners and without some members."""
        seats = [
            self.seat(self._cluster.jobs[old.job], old.masks, old.stretch)
            for old in ([] if group is None else self._staying(group))
            if old.job not in without
        ]
        seats.extend(self.seat(each.job, each.masks, each.stretch) for each in joiners)
        return self.holds(seats, now)

    def _staying(self, group: Group) -> list[Seat]:
        """Members and reservations, less those who leave at their next boundary."""
        return [
            seat
            for seat in group.seats
            if (job := self._cluster.jobs[seat.job]).leaving is None or seat is job.next_seat
        ]

    def holds(self, seats: Sequence[Seat], now: float) -> bool:
        """The exact test of a whole group."""
        if not self._settings.lifetime:
            return self._within_limits(seats)
        reserve = il.load_bound(seats) + self._settings.cold_s
        for seat in seats:
            job = self._cluster.jobs[seat.job]
            seat.target = affordable(job, now, self._settings, reserve if len(seats) > 1 else 0.0)
            seat.target *= 1.0 - self._settings.margin if len(seats) > 1 else 1.0
        if len(seats) == 1:
            seat = seats[0]
            whole = seat.seconds(il.ROLLOUT) + seat.seconds(il.TRAIN)
            return seat.stretch == (1.0, 1.0) or whole <= seat.target * (seat.r + seat.t)
        return min(seat.target for seat in seats) > 1.0 and self._rehearses(seats)

    def _within_limits(self, seats: Sequence[Seat]) -> bool:
        """Worst-case mode: the exact cycle stays under every member's limit."""
        limit = min(self._cluster.jobs[s.job].spec.slo * (s.r + s.t) for s in seats)
        return il.cycle(seats) <= limit

    def _rehearses(self, seats: Sequence[Seat]) -> bool:
        if overloaded(seats, self._settings.warm_s):
            return False
        self.left -= 1
        durations = [self._durations(self._cluster.jobs[seat.job]) for seat in seats]
        slowdowns = il.rehearse(seats, durations, self._order, switch_s=self._settings.warm_s)
        return all(slow <= seat.target for slow, seat in zip(slowdowns, seats, strict=True))

    def _durations(self, job: Job) -> list[tuple[float, float]]:
        if self._settings.learn and job.observed.known:
            return list(job.observed.ring)
        return [(job.spec.worst_rollout_s, job.spec.worst_train_s)]


def overloaded(seats: Sequence[Seat], switch_s: float) -> bool:
    """Whether a node would have to work more than all the time to meet the targets."""
    load: dict[tuple[int, int], float] = {}
    for seat in seats:
        period = seat.target * (seat.r + seat.t)
        for pool in POOLS:
            need = (seat.seconds(pool) + switch_s) / period
            for bit in il.bits(seat.masks[pool]):
                total = load.get((pool, bit), 0.0) + need
                if total > 1.0:
                    return True
                load[pool, bit] = total
    return False
