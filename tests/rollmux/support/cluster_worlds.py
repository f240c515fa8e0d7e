"""Small traces and checked runs for the tests of RollMux."""

import io
from collections.abc import Sequence

import numpy as np
from event_check import Violation, check_lines

from rollpacker.rollmux.model import events as ev
from rollpacker.rollmux.model.jobs import JobSpec
from rollpacker.rollmux.model.settings import Settings
from rollpacker.rollmux.record.event_log import EventLog
from rollpacker.rollmux.record.trace import Philly, TraceJob, philly
from rollpacker.rollmux.scheduler.scheduler import Scheduler
from rollpacker.rollmux.simulation.cluster_sim import ClusterSimulation
from rollpacker.rollmux.simulation.result import SimulationResult


def small(seed: int = 0, **changes: object) -> list[TraceJob]:
    """Ten jobs of about two hours in ten hours."""
    config = {"jobs": 10, "days": 0.4, "mean_hours": 2.0} | changes
    return philly(Philly(**config), np.random.default_rng(seed))


def job(
    name: str,
    rollout: list[float],
    train: list[float],
    *,
    arrival: float = 0.0,
    slo: float = 2.0,
    slack: float = 1.2,
    **spec: object,
) -> TraceJob:
    """A job with these phases, its worst case ``slack`` times the longest."""
    made = JobSpec(
        id=name,
        worst_rollout_s=max(rollout) * slack,
        worst_train_s=max(train) * slack,
        slo=slo,
        iterations=len(rollout),
        **spec,
    )
    return TraceJob(made, arrival, np.array(rollout), np.array(train))


def run(
    jobs: list[TraceJob], settings: Settings, failures: list[tuple[float, int]] | None = None
) -> tuple[SimulationResult, list[Violation], str]:
    """A simulation, what the checker says of its log, and the log."""
    file = io.StringIO()
    simulation = ClusterSimulation(
        jobs, Scheduler(settings), EventLog(file), failures=failures or []
    )
    result = simulation.run()
    text = file.getvalue()
    return result, check_lines(io.StringIO(text)), text


def run_on(
    jobs: list[TraceJob], scheduler: Scheduler, others: Sequence[tuple[float, ev.Event]] = ()
) -> tuple[SimulationResult, list[Violation]]:
    """A simulation with a scheduler of one's own, and what the checker says of its log."""
    file = io.StringIO()
    result = ClusterSimulation(jobs, scheduler, EventLog(file), others=others).run()
    return result, check_lines(io.StringIO(file.getvalue()))
