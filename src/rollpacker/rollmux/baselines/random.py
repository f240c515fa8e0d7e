"""Random: an arriving job goes to any existing nodes, or to its own, with equal chances."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rollpacker.rollmux.baselines.shared import simulate_rule
from rollpacker.rollmux.cluster import Cluster
from rollpacker.rollmux.cluster_sim import Clock
from rollpacker.rollmux.event_log import EventLog
from rollpacker.rollmux.placement import Site
from rollpacker.rollmux.result import SimulationResult
from rollpacker.rollmux.trace import TraceJob


def simulate(
    jobs: Sequence[TraceJob], rng: np.random.Generator, log: EventLog, clock: Clock | None
) -> SimulationResult:
    """The trace."""

    def rule(sites: Sequence[Site], cluster: Cluster) -> Site | None:
        del cluster
        number = int(rng.integers(len(sites) + 1))
        return sites[number] if number < len(sites) else None

    return simulate_rule(jobs, rule, log, clock)
