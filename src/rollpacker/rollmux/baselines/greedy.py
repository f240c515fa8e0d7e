"""Greedy: an arriving job goes to the most idle existing nodes that are not overloaded."""

from __future__ import annotations

from collections.abc import Sequence

from rollpacker.rollmux.baselines.shared import simulate_rule
from rollpacker.rollmux.cluster import Cluster
from rollpacker.rollmux.cluster_sim import Clock
from rollpacker.rollmux.event_log import EventLog
from rollpacker.rollmux.placement import Site
from rollpacker.rollmux.result import SimulationResult
from rollpacker.rollmux.table import node_loads
from rollpacker.rollmux.trace import TraceJob


def simulate(jobs: Sequence[TraceJob], log: EventLog, clock: Clock | None) -> SimulationResult:
    """The trace."""
    return simulate_rule(jobs, most_idle, log, clock)


def most_idle(sites: Sequence[Site], cluster: Cluster) -> Site:
    """The site whose busiest node has the least to do."""

    def busiest(site: Site) -> float:
        assert site.group is not None
        group = cluster.groups[site.group]
        return max(node_loads(group, p)[name] for p in (0, 1) for name in site.nodes[p])

    return min(sites, key=busiest)
