"""Co-located, as veRL does: both phases of a job on training nodes of its own.

A rollout takes as long there as on rollout nodes: an H800 decodes about as fast as an H20. The
published ratio to solo disaggregation (936 / 704 = 1.33) is nearly that of the prices (1.35), so
this takes nothing from co-location.
"""

from __future__ import annotations

from collections.abc import Sequence

from rollpacker.rollmux.baselines.alone import Alone, simulate_alone
from rollpacker.rollmux.event_log import EventLog
from rollpacker.rollmux.result import SimulationResult
from rollpacker.rollmux.settings import Settings
from rollpacker.rollmux.trace import TraceJob


def way(job: TraceJob) -> Alone:
    """Its training nodes, or as many as its rollouts need."""
    nodes = max(job.spec.rollout_nodes, job.spec.train_nodes)
    return Alone((0, nodes), pools=(1, 1))


def simulate(jobs: Sequence[TraceJob], settings: Settings, log: EventLog) -> SimulationResult:
    """The trace."""
    return simulate_alone(jobs, settings, way, log)
