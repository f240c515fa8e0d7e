"""Policies without sharing: a job on nodes of its own, in closed form, at once or from a queue.

- ``solo``, solo disaggregation: every job holds its own rollout and training nodes all its life.
- ``colocated``, as veRL does: both phases on training nodes of its own. A rollout takes as long
  there as on rollout nodes: an H800 decodes about as fast as an H20. The published ratio to solo
  (936 / 704 = 1.33) is nearly that of the prices (1.35), so this takes nothing from co-location.
- ``gavel``, a job-level scheduler that knows its hardware (after Narayanan et al., OSDI'20). It
  takes a job as one thing: it picks the cheapest kind of allocation on which the job keeps its SLO
  (its own two pools, training nodes only, rollout nodes only) and never interleaves phases. Sharing
  in turns of whole iterations needs slowdowns of 2 and more, so it shares nothing here.

On so many nodes jobs wait for nodes of their own: first come, first served. With ``backfill`` a
later job may start as long as the first one in the queue does not start later for it (EASY, Lifka,
1995), where every job's duration is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush, merge
from typing import Any, NamedTuple

from rollpacker.rollmux.model.inventory import count_pools
from rollpacker.rollmux.model.settings import Prices, Settings
from rollpacker.rollmux.record.event_log import EventLog
from rollpacker.rollmux.record.trace import TraceJob
from rollpacker.rollmux.scheduler.inventory_file import InventoryFile
from rollpacker.rollmux.simulation.result import (
    FinishedJob,
    Meter,
    SimulationResult,
    lower_bound,
    span_hours,
)

TRAIN_ON_ROLLOUT_NODES = 989.0 / 148.0
"""Dense bf16 TFLOP/s of an H800 over those of an H20."""


@dataclass(frozen=True, slots=True)
class Alone:
    """How a job runs on nodes of its own.

    Args:
        nodes: of either pool.
        rollout: seconds of a rollout there over those on its own rollout nodes.
        train: the same of training.
        pools: where it rolls out and where it trains.
    """

    nodes: tuple[int, int]
    rollout: float = 1.0
    train: float = 1.0
    pools: tuple[int, int] = (0, 1)

    def seconds(self, job: TraceJob) -> tuple[float, float]:
        """Of all rollouts and of all training."""
        rollout = float(job.rollout_s.sum()) * self.rollout
        return rollout, float(job.train_s.sum()) * self.train


def solo(job: TraceJob, _: Prices) -> Alone:
    """Its gangs as asked for."""
    return Alone(job.spec.gangs)


def colocated(job: TraceJob, _: Prices) -> Alone:
    """Its training nodes, or as many as its rollouts need."""
    return Alone((0, max(job.spec.gangs)), pools=(1, 1))


def gavel(job: TraceJob, prices: Prices) -> Alone:
    """The cheapest kind of allocation that keeps the SLO."""

    def dollars(way: Alone) -> float:
        return prices.of(way.nodes) * sum(way.seconds(job))

    nodes = max(job.spec.gangs)
    cheap = Alone((nodes, 0), train=TRAIN_ON_ROLLOUT_NODES, pools=(0, 0))
    ways = (cheap, colocated(job, prices), solo(job, prices))
    kept = (way for way in ways if sum(way.seconds(job)) <= job.spec.slo * job.solo_s)
    return min(kept, key=dollars)


def simulate_alone(
    jobs: Sequence[TraceJob],
    choose: Callable[[TraceJob, Prices], Alone],
    log: EventLog,
) -> SimulationResult:
    """Every job from its arrival on nodes of its own, at once."""
    settings = Settings()
    meter = Meter(since=jobs[0].arrival_s)
    changes: list[tuple[float, int, int]] = []
    done: list[tuple[float, FinishedJob]] = []
    chosen = [choose(job, settings.prices) for job in jobs]
    if log.wanted:
        log.meta(settings, jobs)
        events = (_events(number, job, chosen[number]) for number, job in enumerate(jobs))
        for at, kind, name, more in merge(*events, key=lambda event: event[0]):
            log.write(at, kind, name, **more)
    for job, way in zip(jobs, chosen, strict=True):
        seconds = way.seconds(job)
        end = job.arrival_s + sum(seconds)
        for pool in (0, 1):
            if way.nodes[pool]:
                changes.append((job.arrival_s, pool, way.nodes[pool]))
                changes.append((end, pool, -way.nodes[pool]))
        for phase, pool in enumerate(way.pools):
            meter.used_s[pool] += seconds[phase] * way.nodes[pool]
        done.append((end, FinishedJob(job.spec.id, end - job.arrival_s, job.solo_s, job.spec.slo)))
    for at, pool, by in sorted(changes):
        meter.change(at, pool, by)
    results = tuple(result for _, result in sorted(done, key=lambda each: each[0]))
    prices = settings.prices
    return SimulationResult(results, meter, span_hours(jobs), lower_bound(jobs, prices), prices)


_Event = tuple[float, str, str, dict[str, Any]]


def _events(number: int, job: TraceJob, way: Alone) -> Iterator[_Event]:
    """The life of one job, a group of its own."""
    name, now = job.spec.id, job.arrival_s
    pools = [[f"{'rt'[p]}{number}.{n}" for n in range(way.nodes[p])] for p in (0, 1)]
    gb = (job.spec.rollout_memory_gb, job.spec.train_memory_gb)
    memory = {node: 0.0 for pool in pools for node in pool}
    for phase, pool in enumerate(way.pools):
        memory |= {node: memory[node] + gb[phase] for node in pools[pool]}
    where = {"group": number, "epoch": 0}
    yield now, "place", name, {**where, "nodes": list(memory), "memory_gb": memory}
    for done, seconds in enumerate(zip(job.rollout_s, job.train_s, strict=True)):
        for phase, pool in enumerate(way.pools):
            more = {"phase": ("rollout", "train")[phase], **where}
            more |= {"round": done, "position": 0, "nodes": pools[pool]}
            yield now, "permit", name, more
            yield now, "start", name, more
            now += float(seconds[phase]) * (way.rollout, way.train)[phase]
            yield now, "end", name, more
    yield now, "depart", name, {"group": number}


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


def waiting(
    nodes: InventoryFile,
) -> dict[str, Callable[[Sequence[TraceJob], int, EventLog], SimulationResult]]:
    """Policies on named nodes, where jobs wait for nodes of their own, by name.

    ``fifo`` and ``backfill`` take nodes of both pools. Co-located jobs take training nodes only,
    those of ``gavel`` rollout nodes only where that keeps their SLO; ``all-training`` has bought
    training nodes with the money of the rollout nodes too. Raises ``ValueError`` on rented nodes.
    """
    if nodes.prices is not None:
        raise ValueError("--inventory: policies without sharing need nodes by name, not cloud")
    prices = Prices()
    both = count_pools(nodes.machines)
    exchanged = 0, int(prices.of(both) / prices.train)

    def queued(
        choose: Choose = solo, there: Nodes = both, *, backfill: bool = True
    ) -> Callable[[Sequence[TraceJob], int, EventLog], SimulationResult]:
        return lambda jobs, _seed, _log: simulate_queued(
            jobs, there, choose, prices, backfill=backfill
        )

    return {
        "fifo": queued(backfill=False),
        "backfill": queued(),
        "colocated": queued(colocated),
        "gavel": queued(gavel),
        "all-training": queued(colocated, exchanged),
    }
