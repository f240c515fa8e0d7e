"""The results of a cluster simulation: cost, SLOs, idle time and peaks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rollpacker.rollmux.model.inventory import POOL_NAMES
from rollpacker.rollmux.model.settings import Prices
from rollpacker.rollmux.model.tail_model import HELD
from rollpacker.rollmux.record.trace import TraceJob

GPUS = 8  # per node


@dataclass(slots=True)
class Meter:
    """Node-seconds held and used, per pool, and the most nodes at once."""

    held_s: list[float] = field(default_factory=lambda: [0.0, 0.0])
    used_s: list[float] = field(default_factory=lambda: [0.0, 0.0])
    nodes: list[int] = field(default_factory=lambda: [0, 0])
    peak: list[int] = field(default_factory=lambda: [0, 0])
    since: float = 0.0

    def change(self, now: float, pool: int, by: int) -> None:
        for each in (0, 1):
            self.held_s[each] += self.nodes[each] * (now - self.since)
        self.since = now
        self.nodes[pool] += by
        self.peak[pool] = max(self.peak[pool], self.nodes[pool])


@dataclass(frozen=True, slots=True)
class FinishedJob:
    """A finished job: seconds from arrival to end, seconds alone, and its SLO.

    Args:
        waited_s: part of ``elapsed_s`` without nodes.
        uncounted_s: part of ``elapsed_s`` that its SLO does not count.
        ended: time of its end.
    """

    id: str
    elapsed_s: float
    solo_s: float
    slo: float
    waited_s: float = 0.0
    uncounted_s: float = 0.0
    ended: float = 0.0

    @property
    def ratio(self) -> float:
        """Slowdown over the allowed one (at most 1 if the SLO was kept)."""
        return (self.elapsed_s - self.uncounted_s) / (self.solo_s * self.slo)

    @property
    def slowdown(self) -> float:
        return self.elapsed_s / self.solo_s


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """The results of a whole simulation."""

    jobs: tuple[FinishedJob, ...]
    meter: Meter
    hours: float  # hours from the first arrival to the last end if every job ran alone
    lower_bound: float  # dollars
    prices: Prices
    decision_s: Sequence[float] = ()
    nodes: tuple[int, int] | None = None
    """Nodes of each pool in an inventory (None if nodes are rented)."""

    @property
    def cost(self) -> float:
        """Dollars."""
        return self.prices.of(self.meter.held_s) / 3600.0

    def to_json(self) -> dict[str, Any]:
        """The output of ``mux simulate --json``."""
        held, used = self.meter.held_s, self.meter.used_s
        ratios = [job.ratio for job in self.jobs]
        waits = np.array([job.waited_s for job in self.jobs])
        slowdowns = np.array([job.slowdown for job in self.jobs])
        kept = sum(ratio <= 1.0 + 1e-9 for ratio in ratios)
        times = np.array(self.decision_s) * 1e3 if len(self.decision_s) else np.zeros(1)
        return {
            **self._spent(),
            "span_h": self.hours,
            "gpu_hours": sum(held) * GPUS / 3600.0,
            "slo_attained": kept / len(ratios),
            "worst_slo_ratio": max(ratios),
            "wait_s": {"mean": float(waits.mean()), "max": float(waits.max())},
            "slowdown": {
                "mean": float(slowdowns.mean()),
                "p95": float(np.percentile(slowdowns, 95)),
            },
            "bubble": {
                name: 1.0 - used[pool] / held[pool] if held[pool] else 0.0
                for pool, name in enumerate(("rollout", "train"))
            },
            "peak_gpus": {
                "rollout": GPUS * self.meter.peak[0],
                "train": GPUS * self.meter.peak[1],
            },
            "decision_ms": {
                "p50": float(np.percentile(times, 50)),
                "p99": float(np.percentile(times, 99)),
            },
            "jobs_done": len(self.jobs),
        }

    def _spent(self) -> dict[str, Any]:
        if self.nodes is None:
            return {
                "cost_per_h": self.cost / self.hours,
                "cost_dollars": self.cost,
                "lower_bound_cost_per_h": self.lower_bound / self.hours,
            }
        ends = [job.ended for job in self.jobs]
        began = min(job.ended - job.elapsed_s for job in self.jobs)
        idle = {
            name: 1.0 - used / (count * (max(ends) - began)) if count else 0.0
            for name, used, count in zip(POOL_NAMES, self.meter.used_s, self.nodes, strict=True)
        }
        return {"idle": idle, "makespan_h": (max(ends) - began) / 3600.0}


def span_hours(jobs: Sequence[TraceJob]) -> float:
    """Hours from the first arrival to the last end if every job ran alone."""
    first = min(job.arrival_s for job in jobs)
    return (max(job.arrival_s + job.solo_s for job in jobs) - first) / 3600.0


def lower_bound(jobs: Iterable[TraceJob], prices: Prices) -> float:
    """Dollars that no schedule can undercut, since every node is busy all the time.

    A rollout holds its nodes until its tail has moved, and then a quarter of them.
    """
    return (
        sum(
            job.rollout_s.sum() * HELD * job.spec.rollout_nodes * prices.rollout
            + job.train_s.sum() * job.spec.train_nodes * prices.train
            for job in jobs
        )
        / 3600.0
    )
