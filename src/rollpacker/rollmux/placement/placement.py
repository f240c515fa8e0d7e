"""Finds sites for a job: all groups are scanned at once, and the best few are tested exactly."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, islice, product

from rollpacker.rollmux.model.cluster import Cluster, CoExecutionGroup, Job, Reservation
from rollpacker.rollmux.model.inventory import Needs
from rollpacker.rollmux.model.seat import POOLS, Seat
from rollpacker.rollmux.model.settings import Settings
from rollpacker.rollmux.placement.admission import (
    Admission,
    Joiner,
    affordable,
    expected,
    expected_end,
)
from rollpacker.rollmux.placement.group_table import GroupTable, node_loads

GUESSED = 8  # sites of each price whose slowdown is guessed
GUESS_EFFORT = 0.05  # of a guess
SITE_EFFORT = 0.01  # of computing a site
GENEROUS = 2.0  # factor by which guesses may be too high
TRIED = 10  # most sites of a job that are tested exactly
ROLLOUT_WEIGHT = 0.35  # weight of a rollout node's load in a site's load (experiments/LOG.md)
SWAPS_TRIED = 3  # most sites tested exactly for a swap


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Nodes for a job: existing ones of a group (None for a new group), and numbers of new ones."""

    group: int | None
    nodes: tuple[tuple[str, ...], tuple[str, ...]]
    fresh: tuple[int, int]
    price: float  # dollars per hour of the new nodes
    score: float = 0.0  # ranks sites of equal price (higher is better)


@dataclass(frozen=True, slots=True)
class Offer:
    """A site, and the growth of the group's value (``Placement.value``)."""

    site: Site
    cost: float


class Placement:
    """Finds sites. It changes nothing."""

    def __init__(self, cluster: Cluster, settings: Settings, admission: Admission) -> None:
        self._cluster = cluster
        self._settings = settings
        self._admission = admission
        self._price = settings.prices.of
        self.table = GroupTable(cluster)

    def isolated(self, job: Job, now: float, *, at_once: bool = False) -> Site | None:
        """A site with nodes of its own, or None if too few are free.

        With ``at_once``, nodes reserved for waiting jobs count as free.
        """
        gangs = job.spec.gangs
        if not self.room(job, gangs, None if at_once else now):
            return None
        return Site(group=None, nodes=((), ()), fresh=gangs, price=self._price(gangs))

    def room(self, job: Job, fresh: tuple[int, int], now: float | None) -> bool:
        """Whether ``fresh`` nodes are free. ``now`` None counts reserved ones as free."""
        kept = None if now is None else self._kept_from(job, now)
        for pool in POOLS:
            if fresh[pool]:
                free = self._cluster.inventory.free(pool, job.needs(pool))
                if free - (kept.fresh[pool] if kept else 0) < fresh[pool]:
                    return False
        return True

    def still(self, site: Site, job: Job) -> bool:
        return self.room(job, site.fresh, None)

    def _kept_from(self, job: Job, now: float) -> Reservation | None:
        """The reservation at the head of the queue, if this job would still run at its start."""
        kept = self._cluster.reservation
        if kept is None or kept.job == job.spec.id:
            return None
        # A job of unknown length may run longer than expected.
        ends = job.spec.iterations is not None
        return None if ends and expected_end(job, now) <= kept.at else kept

    def best(
        self,
        job: Job,
        now: float,
        *,
        below: float,
        avoid: Collection[int] = (),
        thorough: bool = False,
    ) -> Offer | None:
        """The best site in a group that passes the exact test and costs less than ``below``.

        A thorough search tests all sites within the decision's effort. Otherwise guesses choose a
        few.
        """
        self.table.refresh()
        loads = self._loads(job, now)
        sites = [
            site
            for number in self.table.scan(job.spec.gangs, loads, self._settings)
            if number not in avoid
            for site in self.sites(job, self._cluster.groups[number], loads, now=now)
            if site.price < below - 1e-9
        ]
        self._admission.left -= SITE_EFFORT * len(sites)
        return self._choose(sites, job, now, below, thorough)

    def inside(self, job: Job, now: float, *, below: float) -> Offer | None:
        """The best other nodes inside the job's own group. The cost is that of the whole group."""
        assert job.home is not None
        group = self._cluster.groups[job.home.group]
        loads = self._loads(job, now)
        sites = [site for site in self.sites(job, group, loads, now=now) if _moves(site, job)]
        return self._choose(sites, job, now, below)

    def instead(
        self, job: Job, group: CoExecutionGroup, now: float, *, of: str, below: float
    ) -> Offer | None:
        """The best site in a group that ``of`` leaves. The cost is that of the whole group."""
        ranked: list[tuple[float, int, Site]] = []
        for site in self.sites(job, group, self._loads(job, now), (of,), now=now):
            seats, price = self.joined(site, job, (of,))
            ranked.append((price * self._admission.guess(seats), len(ranked), site))
        self._admission.left -= GUESS_EFFORT * len(ranked)
        best: Offer | None = None
        for guess, _, site in sorted(ranked)[:SWAPS_TRIED]:
            if guess > GENEROUS * below:
                break
            seats, price = self.joined(site, job, (of,))
            if price >= below:
                continue
            verdict = self._admission.judge(seats, now)
            if verdict.kept and price * verdict.slowdown < below - 1e-9:
                below = price * verdict.slowdown
                best = Offer(site, below)
        return best

    def _choose(
        self, sites: list[Site], job: Job, now: float, below: float, thorough: bool = False
    ) -> Offer | None:
        sites = sites if thorough else _promising(sites)
        ranked = sorted((self._guess(site, job, now), n) for n, site in enumerate(sites))
        self._admission.left -= GUESS_EFFORT * len(sites)
        best: Offer | None = None
        for tried, (guess, number) in enumerate(ranked):
            limit = below if best is None else best.cost
            if self._admission.left <= 0:
                break
            if not thorough and (tried >= TRIED or guess > GENEROUS * limit):
                break
            cost = self.cost(sites[number], job, now)
            if cost < limit - 1e-9:
                best = Offer(sites[number], cost)
        return best

    def cost(self, site: Site, job: Job, now: float) -> float:
        """Growth of the group's value (infinite if an SLO would be violated)."""
        seats, price = self.joined(site, job)
        verdict = self._admission.judge(seats, now)
        if not verdict.kept:
            return float("inf")
        return price * verdict.slowdown - self._base(site, job, now)

    def _guess(self, site: Site, job: Job, now: float) -> float:
        seats, price = self.joined(site, job)
        return price * self._admission.guess(seats) - self._base(site, job, now)

    def _base(self, site: Site, job: Job, now: float) -> float:
        assert site.group is not None
        if job.home is not None and job.home.group == site.group:
            return 0.0
        return self.value(self._cluster.groups[site.group], now)

    def joined(
        self, site: Site, job: Job, without: Collection[str] = ()
    ) -> tuple[list[Seat], float]:
        """Seats and price of a group after a job has joined it, or moved inside it."""
        assert site.group is not None
        group = self._cluster.groups[site.group]
        joiner = Joiner(job, self._masks(group, site))
        seats = self._admission.seats(group, [joiner], (job.spec.id, *without))
        return seats, self.price_of(seats)

    def price_of(self, seats: Sequence[Seat]) -> float:
        masks = [0, 0]
        for seat in seats:
            masks[0] |= seat.masks[0]
            masks[1] |= seat.masks[1]
        return self._price((masks[0].bit_count(), masks[1].bit_count()))

    def value(self, group: CoExecutionGroup, now: float, without: Collection[str] = ()) -> float:
        """Price times mean slowdown, so that slow jobs count for holding nodes longer."""
        seats = self._admission.seats(group, (), without)
        if not seats:
            return 0.0
        verdict = self._admission.judge(seats, now)
        slowdown = verdict.slowdown
        if slowdown == float("inf"):
            slowdown = self._admission.guess(seats)
        return self.price_of(seats) * slowdown

    def _masks(self, group: CoExecutionGroup, site: Site) -> tuple[int, int]:
        bit = 1 << max((mask.bit_length() for mask in group.bits.values()), default=0)
        masks = [0, 0]
        for pool in POOLS:
            masks[pool] = sum(group.bits[name] for name in site.nodes[pool])
            for _ in range(site.fresh[pool]):
                masks[pool] |= bit
                bit <<= 1
        return masks[0], masks[1]

    def _loads(self, job: Job, now: float) -> tuple[float, float]:
        r, t = expected(job)
        slowdown = max(affordable(job, now), 1.0)
        return r / (slowdown * (r + t)), t / (slowdown * (r + t))

    def sites(
        self,
        job: Job,
        group: CoExecutionGroup,
        loads: tuple[float, float],
        without: Collection[str] = (),
        *,
        now: float,
    ) -> Iterator[Site]:
        """The few most promising ways to pin a job in a group after some members have left."""
        kept = self._kept_from(job, now)
        closed = kept.nodes if kept else frozenset[str]()
        gangs = job.spec.gangs
        ways: list[list[tuple[tuple[str, ...], float]]] = []
        for pool in POOLS:
            load = loads[pool]
            taken = node_loads(group, pool, (job.spec.id, *without))
            needs = job.needs(pool)
            have = {
                name: used
                for name, used in taken.items()
                if used > 0.0 and used + load <= 1.0 and name not in closed
                if self._takes(name, job, needs)
            }
            ways.append(list(_ways(group, pool, gangs[pool], load, have)))
        for (rollout, r_load), (train, t_load) in product(*ways):
            fresh = gangs[0] - len(rollout), gangs[1] - len(train)
            if (rollout or train) and self.room(job, fresh, now):
                yield Site(
                    group=group.id,
                    nodes=(rollout, train),
                    fresh=fresh,
                    price=self._price(fresh),
                    score=t_load + ROLLOUT_WEIGHT * r_load,
                )

    def _takes(self, name: str, job: Job, needs: Needs) -> bool:
        node, inventory = self._cluster.nodes[name], self._cluster.inventory
        others = node.used_gb - node.pins.get(job.spec.id, 0.0)
        return others + needs.memory_gb <= inventory.memory_gb(name) and inventory.takes(
            name, needs
        )


def _ways(
    group: CoExecutionGroup, pool: int, gang: int, load: float, have: Mapping[str, float]
) -> Iterator[tuple[tuple[str, ...], float]]:
    """Existing nodes to take (possibly none) of ``have``, with their load after adding ``load``."""
    yield (), 0.0
    open_nodes = sorted(have, key=lambda name: have[name])
    seen: set[tuple[str, ...]] = set()
    for start in range(3):
        names = tuple(open_nodes[start : start + gang])
        if names and names not in seen and (start == 0 or len(names) == gang):
            seen.add(names)
            yield names, load + sum(have[name] for name in names) / len(names)
    for seat in group.seats:
        names = tuple(n for n in open_nodes if group.bits[n] & seat.masks[pool])
        aligned = len(names) == gang > 1 and seat.masks[pool].bit_count() == gang
        if aligned and names not in seen:
            seen.add(names)
            yield names, load + sum(have[name] for name in names) / gang


def _moves(site: Site, job: Job) -> bool:
    assert job.home is not None
    return site.fresh != (0, 0) or any(
        set(site.nodes[pool]) != set(job.home.nodes[pool]) for pool in POOLS
    )


def _promising(sites: list[Site]) -> list[Site]:
    prices = groupby(sorted(sites, key=_cheapest), key=lambda site: site.price)
    return [site for _, same in prices for site in islice(same, GUESSED)]


def _cheapest(site: Site) -> tuple[float, float]:
    return site.price, -site.score
