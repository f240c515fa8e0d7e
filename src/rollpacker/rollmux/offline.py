"""The offline optimum of small instances: the cheapest way to split known jobs into groups.

All jobs are there at once and known. A group is feasible by the very test that admits jobs
online, so the difference is that of the search alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

from rollpacker.rollmux.admission import Admission
from rollpacker.rollmux.cluster import Cluster, Job
from rollpacker.rollmux.interleave import Seat
from rollpacker.rollmux.settings import Settings


def partitions(items: Sequence[int]) -> Iterator[list[list[int]]]:
    """All ways to split items into non-empty blocks."""
    if not items:
        yield []
        return
    first, rest = items[0], items[1:]
    for size in range(len(rest) + 1):
        for chosen in combinations(rest, size):
            left = [item for item in rest if item not in chosen]
            for blocks in partitions(left):
                yield [[first, *chosen], *blocks]


class Optimum:
    """Best groups and splits of one-node jobs.

    Args:
        jobs: known ones, all with gangs of one node.
        settings: the feasibility test's.
        largest: members of a group.
    """

    def __init__(self, jobs: Sequence[Job], settings: Settings, largest: int = 5) -> None:
        if any(job.gangs() != (1, 1) for job in jobs):
            raise ValueError("offline optimum: gangs of one node only")
        self._jobs = jobs
        self._settings = settings
        self._cluster = Cluster()
        self._cluster.jobs = {job.spec.id: job for job in jobs}
        self._admission = Admission(self._cluster, settings)
        self._largest = largest
        self._prices = settings.prices

    def group_prices(self) -> dict[int, float]:
        """Least price times slowdown of every feasible group, by bit set of jobs.

        Groups that cost no less than the cheapest split of theirs are left out.
        """
        found: dict[int, float] = {}
        best: dict[int, float] = {0: 0.0}
        for size in range(1, len(self._jobs) + 1):
            for members in combinations(range(len(self._jobs)), size):
                key = sum(1 << member for member in members)
                split = _best_split(key, found, best)
                if size <= self._largest:
                    price = self._cheapest(members, split)
                    if price < split:
                        found[key] = split = price
                best[key] = split
        return found

    def value(self) -> float:
        """Of the best split: price times slowdown, summed over its groups."""
        return best_cover(len(self._jobs), self.group_prices())

    def _cheapest(self, members: Sequence[int], below: float) -> float:
        best = float("inf")
        for price, rollouts, trains in self._layouts(members, below):
            if price >= below:
                break
            seats = [self._seat(member, rollouts, trains) for member in members]
            self._admission.refill()
            verdict = self._admission.judge(seats, 0.0)
            if verdict.kept and price * verdict.slowdown < below:
                below = best = price * verdict.slowdown
        return best

    def _seat(self, member: int, rollouts: list[list[int]], trains: list[list[int]]) -> Seat:
        masks = [
            next(1 << bit for bit, block in enumerate(blocks) if member in block)
            for blocks in (rollouts, trains)
        ]
        return self._admission.seat(self._jobs[member], (masks[0], masks[1]), (1.0, 1.0))

    def _layouts(
        self, members: Sequence[int], below: float
    ) -> list[tuple[float, list[list[int]], list[list[int]]]]:
        cap = self._settings.memory_cap_gb
        ways: list[list[list[list[int]]]] = []
        for pool in (0, 1):
            gb = [job.memory_gb(pool, 1) for job in self._jobs]
            ways.append(
                [
                    blocks
                    for blocks in partitions(list(members))
                    if all(sum(gb[member] for member in block) <= cap for block in blocks)
                ]
            )
        layouts = [
            (len(r) * self._prices.rollout + len(t) * self._prices.train, r, t)
            for r in ways[0]
            for t in ways[1]
            if _connected(r, t)
        ]
        cheap = [layout for layout in layouts if layout[0] < below - 1e-9]
        return sorted(cheap, key=lambda layout: layout[0])


def _connected(rollouts: list[list[int]], trains: list[list[int]]) -> bool:
    sets = [set(block) for block in (*rollouts, *trains)]
    reach = sets.pop()
    grown = True
    while grown and sets:
        grown = False
        for block in list(sets):
            if block & reach:
                reach |= block
                sets.remove(block)
                grown = True
    return not sets


def _best_split(key: int, found: Mapping[int, float], best: Mapping[int, float]) -> float:
    """Of the groups found so far that hold the lowest job of ``key``."""
    low = key & -key
    return min(
        (
            price + best[key ^ group]
            for group, price in found.items()
            if group & low and group & key == group
        ),
        default=float("inf"),
    )


def best_cover(count: int, prices: Mapping[int, float]) -> float:
    """The cheapest split of ``count`` jobs into groups, by dynamic programming over sets."""
    best: dict[int, float] = {0: 0.0}
    for key in range(1, 1 << count):
        best[key] = _best_split(key, prices, best)
    return best[(1 << count) - 1]
