"""Solo disaggregation: every job holds its own rollout and training nodes all its life."""

from __future__ import annotations

from collections.abc import Sequence

from rollpacker.rollmux.baselines.alone import Alone, simulate_alone
from rollpacker.rollmux.event_log import EventLog
from rollpacker.rollmux.result import SimulationResult
from rollpacker.rollmux.settings import Settings
from rollpacker.rollmux.trace import TraceJob


def way(job: TraceJob) -> Alone:
    """Its gangs as asked for."""
    return Alone((job.spec.rollout_nodes, job.spec.train_nodes))


def simulate(jobs: Sequence[TraceJob], settings: Settings, log: EventLog) -> SimulationResult:
    """The trace."""
    return simulate_alone(jobs, settings, way, log)
