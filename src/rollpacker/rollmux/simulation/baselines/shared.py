"""RollMux's groups and permits, but a simple rule for where an arriving job goes.

No rule looks at SLOs; host memory and the size of a group are respected.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from rollpacker.rollmux.model.cluster import Cluster, Job
from rollpacker.rollmux.model.settings import PLAIN
from rollpacker.rollmux.placement.group_table import node_loads
from rollpacker.rollmux.placement.placement import Site
from rollpacker.rollmux.record.event_log import EventLog
from rollpacker.rollmux.record.trace import TraceJob
from rollpacker.rollmux.scheduler.scheduler import Scheduler
from rollpacker.rollmux.simulation.cluster_sim import Clock, ClusterSimulation
from rollpacker.rollmux.simulation.result import SimulationResult

Rule = Callable[[Sequence[Site], Cluster], Site | None]
"""Picks one of the sites on existing nodes; None for nodes of its own."""


def most_idle(sites: Sequence[Site], cluster: Cluster) -> Site:
    """Greedy: the site whose busiest node has the least to do."""

    def busiest(site: Site) -> float:
        assert site.group is not None
        group = cluster.groups[site.group]
        return max(node_loads(group, p)[name] for p in (0, 1) for name in site.nodes[p])

    return min(sites, key=busiest)


def at_random(rng: np.random.Generator) -> Rule:
    """Any existing nodes, or its own, with equal chances."""

    def rule(sites: Sequence[Site], _: Cluster) -> Site | None:
        number = int(rng.integers(len(sites) + 1))
        return sites[number] if number < len(sites) else None

    return rule


def simulate_rule(
    jobs: Sequence[TraceJob], rule: Rule, log: EventLog, clock: Clock | None
) -> SimulationResult:
    """The trace."""

    def choose(job: Job, now: float) -> Site | None:
        groups = scheduler.cluster.groups.values()
        sites = [
            site
            for group in groups
            if len(group.seats) < PLAIN.group_size
            for site in scheduler.placement.sites(job, group, (0.0, 0.0), now=now)
            if site.fresh == (0, 0)
        ]
        found = rule(sites, scheduler.cluster) if sites else None
        return found or scheduler.placement.isolated(job, now)

    scheduler = Scheduler(PLAIN, choose=choose)
    return ClusterSimulation(jobs, scheduler, log, clock).run()
