"""Policies without sharing on so many nodes: jobs wait in a queue for nodes of their own.

First come, first served; with ``backfill`` a later job may start as long as the first one in the
queue does not start later for it (EASY, Lifka, 1995), where every job's duration is known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from rollpacker.rollmux.model.settings import Prices
from rollpacker.rollmux.record.trace import TraceJob
from rollpacker.rollmux.simulation.baselines.alone import Alone
from rollpacker.rollmux.simulation.result import (
    FinishedJob,
    Meter,
    SimulationResult,
    lower_bound,
    span_hours,
)

Nodes = tuple[int, int]
Choose = Callable[[TraceJob, Prices], Alone]


class _Running(NamedTuple):
    end: float
    number: int
    nodes: Nodes


class _Pools:
    """What is free, and when more will be."""

    def __init__(self, nodes: Nodes) -> None:
        self.free = list(nodes)
        self.running: list[_Running] = []

    def fits(self, nodes: Nodes) -> bool:
        """Whether so many are free."""
        return nodes[0] <= self.free[0] and nodes[1] <= self.free[1]

    def start(self, run: _Running) -> None:
        """A job takes its nodes."""
        heappush(self.running, run)
        self.free = [free - took for free, took in zip(self.free, run.nodes, strict=True)]

    def finish(self) -> _Running:
        """The next job that ends gives back its own."""
        run = heappop(self.running)
        self.free = [free + took for free, took in zip(self.free, run.nodes, strict=True)]
        return run

    def first_fit(self, nodes: Nodes, now: float) -> tuple[float, list[int]]:
        """When nodes will be free, and what is left of the pools then."""
        free, at = list(self.free), now
        for run in sorted(self.running):
            if nodes[0] <= free[0] and nodes[1] <= free[1]:
                break
            at = run.end
            free = [each + took for each, took in zip(free, run.nodes, strict=True)]
        return at, [free[0] - nodes[0], free[1] - nodes[1]]


class _Cluster:
    """Jobs that start and end; who waits is in ``queue``, by arrival."""

    def __init__(
        self, jobs: Sequence[TraceJob], ways: Sequence[Alone], nodes: Nodes, backfill: bool
    ) -> None:
        self._jobs = jobs
        self._ways = ways
        self._backfill = backfill
        self.pools = _Pools(nodes)
        self.meter = Meter(since=jobs[0].arrival_s)
        self.results: list[FinishedJob] = []
        self._queue: list[int] = []
        self._started: dict[int, float] = {}

    def arrive(self, number: int) -> None:
        """One more job, once all that ended before have."""
        now = self._jobs[number].arrival_s
        while self.pools.running and self.pools.running[0].end <= now:
            self.finish()
        self._queue.append(number)
        self._serve(now)

    def finish(self) -> None:
        """The next job that ends."""
        run = self.pools.finish()
        self._count(run, run.end, -1)
        job, started = self._jobs[run.number], self._started[run.number]
        waited = started - job.arrival_s
        self.results.append(
            FinishedJob(
                job.spec.id,
                run.end - job.arrival_s,
                job.solo_s,
                job.spec.slo,
                waited_s=waited,
                uncounted_s=waited,
                ended=run.end,
            )
        )
        self._serve(run.end)

    def _serve(self, now: float) -> None:
        while self._queue and self.pools.fits(self._ways[self._queue[0]].nodes):
            self._start(self._queue[0], now)
        if not self._queue or not self._backfill:
            return
        at, left = self.pools.first_fit(self._ways[self._queue[0]].nodes, now)
        for number in self._queue[1:]:
            took = self._ways[number].nodes
            over = now + self._seconds(number) <= at
            if self.pools.fits(took) and (over or (took[0] <= left[0] and took[1] <= left[1])):
                self._start(number, now)
                if not over:
                    left = [left[0] - took[0], left[1] - took[1]]

    def _seconds(self, number: int) -> float:
        return sum(self._ways[number].seconds(self._jobs[number]))

    def _start(self, number: int, now: float) -> None:
        way = self._ways[number]
        self._started[number] = now
        self._queue.remove(number)
        run = _Running(now + self._seconds(number), number, way.nodes)
        self.pools.start(run)
        self._count(run, now, 1)
        seconds = way.seconds(self._jobs[number])
        for phase, pool in enumerate(way.pools):
            self.meter.used_s[pool] += seconds[phase] * way.nodes[pool]

    def _count(self, run: _Running, now: float, sign: int) -> None:
        for pool in (0, 1):
            self.meter.change(now, pool, sign * run.nodes[pool])


def simulate_queued(
    jobs: Sequence[TraceJob], nodes: Nodes, choose: Choose, prices: Prices, *, backfill: bool
) -> SimulationResult:
    """The trace on so many rollout and training nodes.

    Raises ``ValueError`` on a gang that never fits.
    """
    ways = [choose(job, prices) for job in jobs]
    for job, way in zip(jobs, ways, strict=True):
        if way.nodes[0] > nodes[0] or way.nodes[1] > nodes[1]:
            raise ValueError(f"job {job.spec.id}: wants {way.nodes} of {nodes} nodes")
    cluster = _Cluster(jobs, ways, nodes, backfill)
    for number in range(len(jobs)):
        cluster.arrive(number)
    while cluster.pools.running:
        cluster.finish()
    bound = lower_bound(jobs, prices)
    results = tuple(cluster.results)
    return SimulationResult(results, cluster.meter, span_hours(jobs), bound, prices, nodes=nodes)
