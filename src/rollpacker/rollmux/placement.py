"""Where to put a job: every group is scanned at once, the best few are tested exactly."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np

from rollpacker.rollmux import interleave as il
from rollpacker.rollmux.admission import Admission, Joiner, affordable, expected
from rollpacker.rollmux.cluster import POOLS, Cluster, Group, Job
from rollpacker.rollmux.settings import Settings

TOP = 24
"""Groups that are looked at closely."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Nodes for a job: in a group (None: a new one), existing ones and how many new ones."""

    group: int | None
    nodes: tuple[tuple[str, ...], tuple[str, ...]]
    fresh: tuple[int, int]
    price: float
    """Dollars per hour of the new nodes."""
    score: float = 0.0
    """Of two sites at one price the higher is better."""
    stretch: tuple[float, float] = (1.0, 1.0)


class Table:
    """One row of numbers per group, for a scan of all groups at once."""

    COLUMNS = 6
    SIZE, ROLLOUTS, TRAINS, ROLLOUT_LOAD, TRAIN_LOAD, TRAIN_MAX = range(COLUMNS)

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._rows = np.full((64, self.COLUMNS), np.inf)
        self._slots: dict[int, int] = {}
        self._ids = np.full(64, -1, dtype=np.int64)
        self._free: list[int] = list(range(63, -1, -1))

    def refresh(self) -> None:
        """Bring the rows of changed groups up to date."""
        for number in sorted(self._cluster.changed):
            group = self._cluster.groups.get(number)
            if group is None:
                self._forget(number)
            else:
                self._rows[self._slot(number)] = self._row(group)
        self._cluster.changed.clear()

    def _forget(self, number: int) -> None:
        slot = self._slots.pop(number, None)
        if slot is not None:
            self._rows[slot] = np.inf
            self._ids[slot] = -1
            self._free.append(slot)

    def _slot(self, number: int) -> int:
        if number not in self._slots:
            if not self._free:
                old = len(self._rows)
                self._rows = np.vstack([self._rows, np.full_like(self._rows, np.inf)])
                self._ids = np.concatenate([self._ids, np.full(old, -1, dtype=np.int64)])
                self._free.extend(range(2 * old - 1, old - 1, -1))
            self._slots[number] = self._free.pop()
            self._ids[self._slots[number]] = number
        return self._slots[number]

    def _row(self, group: Group) -> tuple[float, ...]:
        loads = [list(node_loads(group, pool).values()) or [0.0] for pool in POOLS]
        sizes = len(group.seats), len(group.nodes[0]), len(group.nodes[1])
        return (*map(float, sizes), min(loads[0]), min(loads[1]), max(loads[1]))

    def scan(
        self, gangs: tuple[int, int], loads: tuple[float, float], settings: Settings
    ) -> list[int]:
        """Groups that might take a job, cheapest and then fullest first."""
        rows = self._rows
        keep = np.flatnonzero(rows[:, self.SIZE] < settings.group_size)
        rows = rows[keep]
        fits = [
            rows[:, column] + load <= 1.0
            for column, load in ((self.ROLLOUT_LOAD, loads[0]), (self.TRAIN_LOAD, loads[1]))
        ]
        cost = np.zeros(len(rows))
        for pool, column, price in (
            (0, self.ROLLOUTS, settings.prices.rollout),
            (1, self.TRAINS, settings.prices.train),
        ):
            need = np.maximum(gangs[pool] - rows[:, column], 0.0)
            cost += price * np.where(fits[pool], need, float(gangs[pool]))
        some = fits[0] | fits[1]
        ranked = np.lexsort((self._ids[keep], -rows[:, self.TRAIN_MAX], cost))
        ranked = ranked[some[ranked]][:TOP]
        return [int(number) for number in self._ids[keep][ranked]]


def node_loads(group: Group, pool: int, without: str = "") -> dict[str, float]:
    """Share of the time that each node of a pool has to work to meet all targets."""
    loads = {name: 0.0 for name in group.nodes[pool]}
    for seat in group.seats:
        if seat.job == without:
            continue
        period = max(seat.target, 1.0) * (seat.r + seat.t)
        need = seat.seconds(pool) / period
        for name in loads:
            if group.bits[name] & seat.masks[pool]:
                loads[name] += need
    return loads


class Placement:
    """Finds sites; it changes nothing."""

    def __init__(self, cluster: Cluster, settings: Settings, admission: Admission) -> None:
        self._cluster = cluster
        self._settings = settings
        self._admission = admission
        self.table = Table(cluster)

    def isolated(self, job: Job) -> Site:
        """Nodes of its own."""
        gangs = job.gangs()
        return Site(group=None, nodes=((), ()), fresh=gangs, price=self.price(gangs))

    def price(self, nodes: tuple[int, int]) -> float:
        """Dollars per hour of so many nodes of either pool."""
        prices = self._settings.prices
        return nodes[0] * prices.rollout + nodes[1] * prices.train

    def best(
        self, job: Job, now: float, *, below: float, avoid: Collection[int] = ()
    ) -> Site | None:
        """The cheapest site that passes the exact test and costs less than ``below``."""
        self.table.refresh()
        loads = self._loads(job, now)
        sites = [
            site
            for number in self.table.scan(job.gangs(), loads, self._settings)
            if number not in avoid
            for site in self.sites(job, self._cluster.groups[number], loads)
            if site.price < below - 1e-9
        ]
        return self._first(sites, job, now)

    def inside(self, job: Job, now: float, *, below: float) -> Site | None:
        """The cheapest other nodes inside its own group."""
        assert job.home is not None
        group = self._cluster.groups[job.home.group]
        sites = [
            site
            for site in self.sites(job, group, self._loads(job, now))
            if site.price < below - 1e-9
        ]
        return self._first(sites, job, now)

    def _first(self, sites: list[Site], job: Job, now: float) -> Site | None:
        sites.sort(key=lambda site: (site.price, -site.score))
        for site in sites:
            if self._admission.left <= 0:
                return None
            if self.admits(site, job, now, (job.spec.id,)):
                return site
        return None

    def admits(self, site: Site, job: Job, now: float, without: Collection[str] = ()) -> bool:
        """The exact test of one site."""
        assert site.group is not None
        group = self._cluster.groups[site.group]
        return self._admission.admits(
            group, now, [Joiner(job, self._masks(group, site), site.stretch)], without
        )

    def _masks(self, group: Group, site: Site) -> tuple[int, int]:
        bit = 1 << max((mask.bit_length() for mask in group.bits.values()), default=0)
        masks = [0, 0]
        for pool in POOLS:
            masks[pool] = sum(group.bits[name] for name in site.nodes[pool])
            for _ in range(site.fresh[pool]):
                masks[pool] |= bit
                bit <<= 1
        return masks[0], masks[1]

    def _loads(self, job: Job, now: float) -> tuple[float, float]:
        r, t = expected(job, self._settings)
        slowdown = max(affordable(job, now, self._settings, 0.0), 1.0)
        return r / (slowdown * (r + t)), t / (slowdown * (r + t))

    def sites(self, job: Job, group: Group, loads: tuple[float, float]) -> Iterator[Site]:
        """Ways to pin a job in a group: few, the most promising ones."""
        gangs = job.gangs()
        ways = [list(self._ways(job, group, pool, gangs[pool], loads[pool])) for pool in POOLS]
        for (rollout, r_load), (train, t_load) in product(*ways):
            if not rollout and not train:
                continue
            fresh = gangs[0] - len(rollout), gangs[1] - len(train)
            yield Site(
                group=group.id,
                nodes=(rollout, train),
                fresh=fresh,
                price=self.price(fresh),
                score=t_load + 0.35 * r_load,
            )

    def _ways(
        self, job: Job, group: Group, pool: int, gang: int, load: float
    ) -> Iterator[tuple[tuple[str, ...], float]]:
        """Existing nodes to take, with the load that they would have; none is a way too."""
        yield (), 0.0
        gb = job.memory_gb(pool, gang)
        cap = self._settings.memory_cap_gb
        loads = node_loads(group, pool, job.spec.id)
        open_nodes = [
            name
            for name, used in loads.items()
            if used + load <= 1.0 and self._others_gb(name, job) + gb <= cap and used > 0.0
        ]
        open_nodes.sort(key=lambda name: loads[name])
        seen: set[tuple[str, ...]] = set()
        for start in range(3):
            names = tuple(open_nodes[start : start + gang])
            if names and names not in seen and (start == 0 or len(names) == gang):
                seen.add(names)
                yield names, load + sum(loads[name] for name in names) / len(names)
        for seat in group.seats:
            names = tuple(n for n in open_nodes if group.bits[n] & seat.masks[pool])
            if len(names) == gang > 1 and seat.masks[pool].bit_count() == gang:
                if names not in seen:
                    seen.add(names)
                    yield names, load + sum(loads[name] for name in names) / gang

    def _others_gb(self, name: str, job: Job) -> float:
        pins = self._cluster.nodes[name].pins
        return self._cluster.nodes[name].used_gb - pins.get(job.spec.id, 0.0)
