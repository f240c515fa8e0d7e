"""Gavel+: a job-level scheduler that knows its hardware (after Narayanan et al., OSDI'20).

It takes a job as one thing: it picks the cheapest kind of allocation on which the job keeps its
SLO (its own two pools, training nodes only, rollout nodes only) and never interleaves phases.
Sharing in turns of whole iterations needs slowdowns of 2 and more, so it shares nothing here.
"""

from __future__ import annotations

from collections.abc import Sequence

from rollpacker.rollmux.baselines import colocated, solo
from rollpacker.rollmux.baselines.alone import Alone, simulate_alone
from rollpacker.rollmux.event_log import EventLog
from rollpacker.rollmux.result import SimulationResult
from rollpacker.rollmux.settings import Settings
from rollpacker.rollmux.trace import TraceJob

TRAIN_ON_ROLLOUT_NODES = 989.0 / 148.0
"""Dense bf16 TFLOP/s of an H800 over those of an H20."""


def ways(job: TraceJob) -> list[Alone]:
    """Kinds of allocation."""
    nodes = max(job.spec.rollout_nodes, job.spec.train_nodes)
    cheap = Alone((nodes, 0), train=TRAIN_ON_ROLLOUT_NODES, pools=(0, 0))
    return [cheap, colocated.way(job), solo.way(job)]


def simulate(jobs: Sequence[TraceJob], settings: Settings, log: EventLog) -> SimulationResult:
    """The trace."""
    prices = settings.prices

    def dollars(job: TraceJob, way: Alone) -> float:
        per_hour = way.nodes[0] * prices.rollout + way.nodes[1] * prices.train
        return per_hour * sum(way.seconds(job))

    def choose(job: TraceJob) -> Alone:
        kept = [way for way in ways(job) if sum(way.seconds(job)) <= job.spec.slo * job.solo_s]
        return min(kept, key=lambda way: dollars(job, way))

    return simulate_alone(jobs, settings, choose, log)
