"""The policies that ``mux simulate`` knows, by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from rollpacker.rollmux.baselines.alone import colocated, gavel, simulate_alone, solo
from rollpacker.rollmux.baselines.shared import at_random, most_idle, simulate_rule
from rollpacker.rollmux.cluster_sim import Clock, ClusterSimulation
from rollpacker.rollmux.event_log import EventLog
from rollpacker.rollmux.result import SimulationResult
from rollpacker.rollmux.scheduler import Scheduler
from rollpacker.rollmux.settings import PLAIN, Settings
from rollpacker.rollmux.trace import TraceJob


@dataclass(frozen=True, slots=True)
class Run:
    """One simulation: a trace, a seed for policies that draw, where events go, a clock."""

    jobs: Sequence[TraceJob]
    seed: int
    log: EventLog
    clock: Clock | None


def scheduled(run: Run, settings: Settings) -> SimulationResult:
    """A trace through the scheduler."""
    return ClusterSimulation(run.jobs, Scheduler(settings), run.log, run.clock).run()


def _random(run: Run) -> SimulationResult:
    rule = at_random(np.random.default_rng(run.seed))
    return simulate_rule(run.jobs, rule, run.log, run.clock)


POLICIES: dict[str, Callable[[Run], SimulationResult]] = {
    "solo": lambda run: simulate_alone(run.jobs, solo, run.log),
    "colocated": lambda run: simulate_alone(run.jobs, colocated, run.log),
    "gavel": lambda run: simulate_alone(run.jobs, gavel, run.log),
    "random": _random,
    "greedy": lambda run: simulate_rule(run.jobs, most_idle, run.log, run.clock),
    "rollmux": lambda run: scheduled(run, Settings()),
    "rollmux-plain": lambda run: scheduled(run, PLAIN),
}
