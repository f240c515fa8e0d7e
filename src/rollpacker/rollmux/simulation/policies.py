"""The policies that ``mux simulate`` knows, by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from rollpacker.rollmux.model.inventory import count_pools
from rollpacker.rollmux.model.settings import PLAIN, Prices, Settings
from rollpacker.rollmux.record.event_log import EventLog
from rollpacker.rollmux.record.trace import TraceJob
from rollpacker.rollmux.scheduler.inventory_file import InventoryFile
from rollpacker.rollmux.scheduler.scheduler import Scheduler
from rollpacker.rollmux.simulation.baselines.alone import colocated, gavel, simulate_alone, solo
from rollpacker.rollmux.simulation.baselines.queued import Choose, simulate_queued
from rollpacker.rollmux.simulation.baselines.shared import at_random, most_idle, simulate_rule
from rollpacker.rollmux.simulation.cluster_sim import Clock, ClusterSimulation
from rollpacker.rollmux.simulation.result import SimulationResult


@dataclass(frozen=True, slots=True)
class Run:
    """One simulation: a trace, a seed for policies that draw, where events go, a clock.

    Args:
        nodes: what there is; None for a cloud without a limit.
    """

    jobs: Sequence[TraceJob]
    seed: int
    log: EventLog
    clock: Clock | None
    nodes: InventoryFile | None = None


def scheduled(run: Run, settings: Settings) -> SimulationResult:
    """A trace through the scheduler."""
    scheduler = Scheduler(settings) if run.nodes is None else run.nodes.scheduler(settings)
    return ClusterSimulation(run.jobs, scheduler, run.log, run.clock).run()


def _queued(
    run: Run, choose: Choose = solo, *, exchanged: bool = False, backfill: bool = True
) -> SimulationResult:
    """Without sharing, on the nodes of an inventory.

    Args:
        choose: which nodes a job takes.
        exchanged: for as many training nodes as all of them would pay for.
    """
    assert run.nodes is not None
    if run.nodes.prices is not None:
        raise ValueError("--inventory: policies without sharing need nodes by name, not cloud")
    prices = Prices()
    nodes = count_pools(run.nodes.machines)
    if exchanged:
        nodes = 0, int(prices.of(nodes) / prices.train)
    return simulate_queued(run.jobs, nodes, choose, prices, backfill=backfill)


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
WITHOUT_SHARING: dict[str, Callable[[Run], SimulationResult]] = {
    "fifo": lambda run: _queued(run, backfill=False),
    "backfill": _queued,
    "colocated": lambda run: _queued(run, colocated),
    "gavel": lambda run: _queued(run, gavel),
    "all-training": lambda run: _queued(run, colocated, exchanged=True),
}
"""On named nodes, beside ``rollmux`` and ``rollmux-plain``: jobs wait for nodes of their own.

``fifo`` and ``backfill`` take nodes of both pools. Co-located jobs take training nodes only, those
of ``gavel`` rollout nodes only where that keeps their SLO; ``all-training`` has bought training
nodes with the money of the rollout nodes too.
"""


def named(policy: str, *, inventory: bool) -> Callable[[Run], SimulationResult]:
    """A policy by name. Raises ``ValueError`` with those that there are."""
    known = POLICIES
    if inventory:
        known = WITHOUT_SHARING | {name: POLICIES[name] for name in ("rollmux", "rollmux-plain")}
    if policy not in known:
        where = "with --inventory " if inventory else ""
        raise ValueError(f"--policy {policy}: choose {where}one of {', '.join(known)}")
    return known[policy]
