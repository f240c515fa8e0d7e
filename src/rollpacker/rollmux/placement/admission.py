"""Admission: the slowdown that a job can afford, and the exact test of a group."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from math import inf

from rollpacker.rollmux.model.cluster import Cluster, CoExecutionGroup, Job
from rollpacker.rollmux.model.inventory import Needs
from rollpacker.rollmux.model.seat import NEVER, POOLS, ROLLOUT, Seat
from rollpacker.rollmux.model.settings import Settings
from rollpacker.rollmux.model.tail_model import HELD
from rollpacker.rollmux.placement.group_simulation import rehearse
from rollpacker.rollmux.placement.permit_order import bits, load_bound

Masks = tuple[int, int]
Members = tuple[tuple[str, int, int, bool, bool], ...]
"""For each member: job, masks of both pools, whether it is known, whether it leaves tails."""

GUESSED_SLOWDOWN = 1.3  # assumed slowdown of all members in a guess (experiments/LOG.md)
SEAT_EFFORT = 0.35  # of simulating a member
REMEMBER_S = 7200.0  # seconds for which a simulated slowdown stays valid
REMEMBERED = 2_000
TURNS_OUT = 0.8  # share of its worst case that an unknown job may really take (experiments/LOG.md)


@dataclass(frozen=True, slots=True)
class GroupVerdict:
    """Whether a group meets all SLOs, and its mean slowdown."""

    kept: bool
    slowdown: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsed:
    """The slowdown of each member of a group simulated at ``at``. None is infinite: JSON has no
    infinity."""

    members: Members
    at: float
    slowdowns: dict[str, float | None]


@dataclass(frozen=True, slots=True)
class Joiner:
    """A job that might join a group, with the masks of its nodes."""

    job: Job
    masks: Masks


def expected(job: Job) -> tuple[float, float]:
    """Rollout and training seconds to plan with: observed means, or the worst case at first."""
    if job.observed.known:
        return job.observed.means
    return job.spec.worst_rollout_s, job.spec.worst_train_s


def affordable(job: Job, now: float, reserve_s: float = 0.0) -> float:
    """The slowdown at which the rest of a job's life uses up its lifetime budget.

    The budget is ``slo * (seconds alone, done and to come)`` less the elapsed time and a reserve.
    """
    rest = job.remaining() * sum(expected(job))
    budget = job.spec.slo * (job.solo_s + rest) - (now - job.started) - reserve_s
    return budget / rest


def expected_end(job: Job, now: float) -> float:
    """Expected end of a job at its pace so far (``NEVER`` for a job of unknown length)."""
    left = job.spec.left(job.done)
    if left is None:
        return NEVER
    pace = GUESSED_SLOWDOWN
    if job.solo_s > 0.0:
        pace = max(1.0, (now - job.started) / job.solo_s)
    return now + left * sum(expected(job)) * pace


class Admission:
    """The exact test, with an effort budget for each decision."""

    def __init__(self, cluster: Cluster, settings: Settings) -> None:
        self._cluster = cluster
        self._settings = settings
        self.left = float(settings.effort)
        self.rehearsed: dict[Members, Rehearsed] = {}
        self.few = not all(
            cluster.inventory.ever(pool, Needs(memory_gb=0.0)) == inf for pool in POOLS
        )
        """Whether the number of nodes is limited."""

    def refill(self) -> None:
        self.left = float(self._settings.effort)

    def seat(self, job: Job, masks: Masks) -> Seat:
        """A seat with the job's expected seconds. Its target is not set yet."""
        r, t = expected(job)
        return Seat(job.spec.id, masks, r, t)

    def seats(
        self,
        group: CoExecutionGroup | None,
        joiners: Iterable[Joiner] = (),
        without: Collection[str] = (),
    ) -> list[Seat]:
        """Fresh seats of members and reservations, plus ``joiners`` and less ``without``."""
        seats: list[Seat] = []
        for old in [] if group is None else group.seats:
            job = self._cluster.jobs[old.job]
            if old.job not in without and (job.destination is None or old is job.next_seat):
                seats.append(self.seat(job, old.masks))
        seats.extend(self.seat(each.job, each.masks) for each in joiners)
        return seats

    def judge(self, seats: Sequence[Seat], now: float) -> GroupVerdict:
        if not self._settings.lifetime:
            return GroupVerdict(self._within_limits(seats), 1.0)
        reserve = load_bound(seats) + self._settings.cold_s
        for seat in seats:
            job = self._cluster.jobs[seat.job]
            target = affordable(job, now, reserve if len(seats) > 1 else 0.0)
            target *= 1.0 - self._settings.margin if len(seats) > 1 else 1.0
            seat.promise(target, since=0.0)
        if len(seats) == 1:
            seat = seats[0]
            slow = seat.iteration_s / (seat.r + seat.t)
            return GroupVerdict(slow == 1.0 or slow <= seat.target, slow)
        return self._remembered(seats, now)

    def slowdown(self, seats: Sequence[Seat], job: Job, now: float) -> float:
        for seat in seats:
            target = affordable(self._cluster.jobs[seat.job], now)
            seat.promise(target, since=0.0)
        return self._slowdowns(sorted(seats, key=lambda seat: seat.job), now)[job.spec.id]

    def _remembered(self, seats: Sequence[Seat], now: float) -> GroupVerdict:
        # The seating order must not change the verdict.
        seats = sorted(seats, key=lambda seat: seat.job)
        hopeless = min(seat.target for seat in seats) <= 1.0
        if self._recall(seats, now) is None and (
            hopeless or overloaded(seats, self._settings.warm_s, self._tails(seats))
        ):
            return GroupVerdict(False, float("inf"))
        slow = self._slowdowns(seats, now)
        kept = all(self._at_worst(seat.job, slow[seat.job]) <= seat.target for seat in seats)
        return GroupVerdict(kept, self._mean([slow[seat.job] for seat in seats], seats))

    def _at_worst(self, job: str, slowdown: float) -> float:
        """The slowdown if a job that is not known yet takes much less than its worst case.

        Its waits for others stay the same. Free nodes would fix that later, so this is for limited
        nodes.
        """
        if not self.few or self._known(job):
            return slowdown
        return 1.0 + (slowdown - 1.0) / TURNS_OUT

    def _key(self, seats: Sequence[Seat]) -> Members:
        jobs = self._cluster.jobs
        return tuple(
            (seat.job, *seat.masks, self._known(seat.job), jobs[seat.job].leaves_tails)
            for seat in seats
        )

    def _recall(self, seats: Sequence[Seat], now: float) -> dict[str, float] | None:
        known = self.rehearsed.get(self._key(seats))
        if known is None or known.at <= now - REMEMBER_S:
            return None
        return {job: inf if slow is None else slow for job, slow in known.slowdowns.items()}

    def _slowdowns(self, seats: Sequence[Seat], now: float) -> dict[str, float]:
        slow = self._recall(seats, now)
        if slow is None:
            slow = self._rehearse(seats)
            if len(self.rehearsed) >= REMEMBERED:
                self.rehearsed.clear()
            known = {job: None if each == inf else each for job, each in slow.items()}
            members = self._key(seats)
            self.rehearsed[members] = Rehearsed(members=members, at=now, slowdowns=known)
        return slow

    def _known(self, job: str) -> bool:
        return self._cluster.jobs[job].observed.known

    def _mean(self, slow: Sequence[float], seats: Sequence[Seat]) -> float:
        price = self._settings.prices.of
        weights = [price(self._cluster.jobs[seat.job].spec.gangs) for seat in seats]
        return sum(weights) / sum(w / s for w, s in zip(weights, slow, strict=True))

    def guess(self, seats: Sequence[Seat]) -> float:
        """Quick estimate of the mean slowdown from queueing, for ranking."""
        slow: list[float] = []
        for seat in seats:
            wait = 0.0
            for pool in POOLS:
                busy = delay = 0.0
                for other in seats:
                    if other is not seat and other.masks[pool] & seat.masks[pool]:
                        share = other.seconds(pool) / (GUESSED_SLOWDOWN * (other.r + other.t))
                        busy += share
                        delay += share * other.seconds(pool) / 2.0
                wait += delay / max(1.0 - busy, 0.1)
            slow.append((seat.iteration_s + wait) / (seat.r + seat.t))
        return self._mean(slow, seats)

    def _within_limits(self, seats: Sequence[Seat]) -> bool:
        worst: list[Seat] = []
        limit = inf
        for seat in seats:
            spec = self._cluster.jobs[seat.job].spec
            worst.append(Seat(seat.job, seat.masks, spec.worst_rollout_s, spec.worst_train_s))
            limit = min(limit, spec.slo * worst[-1].iteration_s)
        return load_bound(worst) <= limit

    def _rehearse(self, seats: Sequence[Seat]) -> dict[str, float]:
        self.left -= SEAT_EFFORT * len(seats)
        durations = [self._durations(self._cluster.jobs[seat.job]) for seat in seats]
        slowdowns = rehearse(
            seats,
            durations,
            switch_s=self._settings.warm_s,
            tails=self._tails(seats),
        )
        return {seat.job: slow for seat, slow in zip(seats, slowdowns, strict=True)}

    def _tails(self, seats: Sequence[Seat]) -> set[str]:
        if not self._settings.tails:
            return set()
        return {seat.job for seat in seats if self._cluster.jobs[seat.job].leaves_tails}

    def _durations(self, job: Job) -> list[tuple[float, float]]:
        if job.observed.known:
            return list(job.observed.ring)
        return [(job.spec.worst_rollout_s, job.spec.worst_train_s)]


def overloaded(seats: Sequence[Seat], switch_s: float, tails: Collection[str] = ()) -> bool:
    """Whether the targets need more than the whole time of a node. ``tails`` are jobs that leave
    tails."""
    load: dict[tuple[int, int], float] = {}
    for seat in seats:
        period = seat.target * (seat.r + seat.t)
        for pool in POOLS:
            share = HELD if pool == ROLLOUT and seat.job in tails else 1.0
            need = (seat.seconds(pool) + switch_s) * share / period
            for bit in bits(seat.masks[pool]):
                total = load.get((pool, bit), 0.0) + need
                if total > 1.0:
                    return True
                load[pool, bit] = total
    return False
