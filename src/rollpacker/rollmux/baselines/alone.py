"""What policies without sharing have in common: a job on nodes of its own, in closed form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rollpacker.rollmux.event_log import EventLog
from rollpacker.rollmux.result import JobResult, Meter, SimulationResult, lower_bound, span_hours
from rollpacker.rollmux.settings import Settings
from rollpacker.rollmux.trace import TraceJob


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


def simulate_alone(
    jobs: Sequence[TraceJob],
    settings: Settings,
    choose: Callable[[TraceJob], Alone],
    log: EventLog,
) -> SimulationResult:
    """Every job from its arrival on nodes of its own, at once."""
    meter = Meter(since=jobs[0].arrival_s)
    changes: list[tuple[float, int, int]] = []
    done: list[tuple[float, JobResult]] = []
    log.meta(settings, jobs)
    for job in jobs:
        way = choose(job)
        seconds = way.seconds(job)
        end = job.arrival_s + sum(seconds)
        for pool in (0, 1):
            if way.nodes[pool]:
                changes.append((job.arrival_s, pool, way.nodes[pool]))
                changes.append((end, pool, -way.nodes[pool]))
        for phase, pool in enumerate(way.pools):
            meter.used_s[pool] += seconds[phase] * way.nodes[pool]
        done.append((end, JobResult(job.spec.id, end - job.arrival_s, job.solo_s, job.spec.slo)))
    for at, pool, by in sorted(changes):
        meter.change(at, pool, by)
    results = tuple(result for _, result in sorted(done, key=lambda each: each[0]))
    prices = settings.prices
    return SimulationResult(
        results, meter, span_hours(jobs), lower_bound(jobs, prices), prices
    )
