"""Policies without sharing: a job on nodes of its own, in closed form.

- ``solo``, solo disaggregation: every job holds its own rollout and training nodes all its life.
- ``colocated``, as veRL does: both phases on training nodes of its own. A rollout takes as long
  there as on rollout nodes: an H800 decodes about as fast as an H20. The published ratio to solo
  (936 / 704 = 1.33) is nearly that of the prices (1.35), so this takes nothing from co-location.
- ``gavel``, a job-level scheduler that knows its hardware (after Narayanan et al., OSDI'20). It
  takes a job as one thing: it picks the cheapest kind of allocation on which the job keeps its SLO
  (its own two pools, training nodes only, rollout nodes only) and never interleaves phases. Sharing
  in turns of whole iterations needs slowdowns of 2 and more, so it shares nothing here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import merge
from typing import Any

from rollpacker.rollmux.model.settings import Prices, Settings
from rollpacker.rollmux.record.event_log import EventLog
from rollpacker.rollmux.record.trace import TraceJob
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
