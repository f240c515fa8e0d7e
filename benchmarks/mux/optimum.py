"""How far the online scheduler is from the offline optimum on small instances.

    python -m benchmarks.mux.optimum --instances 10 --jobs 7

All jobs are known and long. Online they arrive one after the other; the scheduler repacks until it
finds nothing more. Offline all are there at once and the cheapest way to split them into groups is
found. A group is feasible by the very test that admits jobs online, so the difference is that of
the search alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations

import numpy as np
from msgspec import structs

from benchmarks._run import flags
from rollpacker.rollmux.model import decisions as do
from rollpacker.rollmux.model import events as ev
from rollpacker.rollmux.model.cluster import Cluster, Job
from rollpacker.rollmux.model.inventory import Cloud
from rollpacker.rollmux.model.seat import Seat
from rollpacker.rollmux.model.settings import Settings
from rollpacker.rollmux.placement.admission import Admission
from rollpacker.rollmux.record.trace import Philly, TraceJob, philly
from rollpacker.rollmux.scheduler.scheduler import Scheduler


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
        if any(job.spec.gangs != (1, 1) for job in jobs):
            raise ValueError("offline optimum: gangs of one node only")
        self._jobs = jobs
        self._settings = settings
        self._cluster = Cluster(Cloud(settings.memory_cap_gb))
        self._cluster.jobs = {job.spec.id: job for job in jobs}
        self._admission = Admission(self._cluster, settings)
        self._largest = largest
        self._prices = settings.prices

    def solve(self) -> tuple[dict[int, float], float]:
        """By bit set of jobs, the least price times slowdown of groups; and of the best split.

        Groups that cost no less than the cheapest split of theirs are left out. By dynamic
        programming over sets: those of fewer jobs come first.
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
        return found, best[(1 << len(self._jobs)) - 1]

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
        return self._admission.seat(self._jobs[member], (masks[0], masks[1]))

    def _layouts(
        self, members: Sequence[int], below: float
    ) -> list[tuple[float, list[list[int]], list[list[int]]]]:
        cap = self._settings.memory_cap_gb
        ways: list[list[list[list[int]]]] = []
        for pool in (0, 1):
            gb = [job.memory_gb(pool) for job in self._jobs]
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


def instance(count: int, seed: int) -> list[TraceJob]:
    rng = np.random.default_rng(seed)
    jobs: list[TraceJob] = []
    while len(jobs) < count:
        jobs += [j for j in philly(Philly(jobs=count), rng) if len(j.rollout_s) > 150]
    return [
        replace(job, spec=structs.replace(job.spec, id=f"job{number}"))
        for number, job in enumerate(jobs[:count])
    ]


def known(job: TraceJob, live: Job) -> None:
    for pair in zip(job.rollout_s[:60], job.train_s[:60], strict=True):
        live.observed.add(float(pair[0]), float(pair[1]))


def optimum(jobs: list[TraceJob], settings: Settings) -> float:
    live = []
    for job in jobs:
        live.append(Job(job.spec, 0.0))
        known(job, live[-1])
    return Optimum(live, settings, largest=len(jobs)).solve()[1]


def value(scheduler: Scheduler) -> float:
    groups = scheduler.cluster.groups.values()
    return sum(scheduler.placement.value(group, 0.0) for group in groups)


def online(jobs: list[TraceJob], settings: Settings, rounds: int = 60) -> float:
    """Jobs wait for nothing: a move is over at once."""
    scheduler = Scheduler(settings)
    for job in jobs:
        _settle(scheduler, ev.JobArrived(spec=job.spec))
        live = scheduler.cluster.jobs[job.spec.id]
        known(job, live)
        assert live.seat is not None
        live.seat.learn(0.0, live.observed.means)
        scheduler.cluster.changed.update(scheduler.cluster.groups)
        scheduler.look_again()
        for _ in range(rounds):
            _settle(scheduler, None)
    return value(scheduler)


def _settle(scheduler: Scheduler, event: ev.JobArrived | None) -> None:
    waiting: deque[do.Decision] = deque(
        scheduler.handle(0.0, ev.TimePassed() if event is None else event)
    )
    while waiting:
        decision = waiting.popleft()
        if isinstance(decision, do.Move):
            waiting.extend(scheduler.handle(0.0, ev.MoveFinished(job=decision.job)))


def main() -> None:
    args = flags(__doc__, instances=10, jobs=7, seed=0).parse_args()
    settings = Settings()
    gaps: list[float] = []
    for number in range(args.instances):
        jobs = instance(args.jobs, args.seed + number)
        best, ours = optimum(jobs, settings), online(jobs, settings)
        alone = 57.04 * len(jobs)
        gaps.append(ours / best - 1.0)
        print(
            f"solo {alone:.0f}, optimum {best:.1f}, online {ours:.1f}, gap {gaps[-1]:+.1%}",
            flush=True,
        )
    print(f"mean gap {np.mean(gaps):.1%}, worst {max(gaps):.1%} over {len(gaps)} instances")


if __name__ == "__main__":
    main()
