"""What a cluster simulation measures: money, promises, idle time, peaks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rollpacker.policy.tail_release import TAIL_ENGINES
from rollpacker.rollmux.settings import Prices
from rollpacker.rollmux.trace import TraceJob

GPUS = 8
"""Per node."""
TAIL_TIME = 0.70
"""Share of a rollout's time after which about 80% of its responses are done."""
TAIL_COST = 0.02
"""A rollout whose tail moved takes so much longer."""


@dataclass(slots=True)
class Meter:
    """Node-seconds held and used, per pool, and the most nodes at once."""

    held_s: list[float] = field(default_factory=lambda: [0.0, 0.0])
    used_s: list[float] = field(default_factory=lambda: [0.0, 0.0])
    nodes: list[int] = field(default_factory=lambda: [0, 0])
    peak: list[int] = field(default_factory=lambda: [0, 0])
    since: float = 0.0

    def change(self, now: float, pool: int, by: int) -> None:
        """Nodes were taken or given back."""
        for each in (0, 1):
            self.held_s[each] += self.nodes[each] * (now - self.since)
        self.since = now
        self.nodes[pool] += by
        self.peak[pool] = max(self.peak[pool], self.nodes[pool])


@dataclass(frozen=True, slots=True)
class JobResult:
    """A finished job: seconds from arrival to end, alone, and what it was promised."""

    id: str
    elapsed_s: float
    solo_s: float
    slo: float

    @property
    def ratio(self) -> float:
        """Slowdown over the allowed one; at most 1 when the promise was kept."""
        return self.elapsed_s / (self.solo_s * self.slo)


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """A whole simulation."""

    jobs: tuple[JobResult, ...]
    meter: Meter
    hours: float
    """Of the trace: from the first arrival to when the last job would end alone."""
    lower_bound: float
    """Dollars."""
    prices: Prices
    decision_s: Sequence[float] = ()

    @property
    def cost(self) -> float:
        """Dollars."""
        return self.prices.of(self.meter.held_s) / 3600.0

    def to_json(self) -> dict[str, Any]:
        """What ``mux simulate --json`` prints."""
        held, used = self.meter.held_s, self.meter.used_s
        ratios = [job.ratio for job in self.jobs]
        kept = sum(ratio <= 1.0 + 1e-9 for ratio in ratios)
        times = np.array(self.decision_s) * 1e3 if len(self.decision_s) else np.zeros(1)
        return {
            "cost_per_h": self.cost / self.hours,
            "cost_dollars": self.cost,
            "span_h": self.hours,
            "gpu_hours": sum(held) * GPUS / 3600.0,
            "slo_attained": kept / len(ratios),
            "worst_slo_ratio": max(ratios),
            "bubble": {
                name: 1.0 - used[pool] / held[pool] if held[pool] else 0.0
                for pool, name in enumerate(("rollout", "train"))
            },
            "peak_gpus": {
                "rollout": GPUS * self.meter.peak[0],
                "train": GPUS * self.meter.peak[1],
            },
            "lower_bound_cost_per_h": self.lower_bound / self.hours,
            "decision_ms": {
                "p50": float(np.percentile(times, 50)),
                "p99": float(np.percentile(times, 99)),
            },
            "jobs_done": len(self.jobs),
        }


def span_hours(jobs: Sequence[TraceJob]) -> float:
    """Hours from the first arrival to the last end if every job ran alone: of the trace only."""
    first = min(job.arrival_s for job in jobs)
    return (max(job.arrival_s + job.solo_s for job in jobs) - first) / 3600.0


def lower_bound(jobs: Iterable[TraceJob], prices: Prices) -> float:
    """Dollars that no schedule goes below: every node busy all the time.

    A rollout holds its nodes until its tail has moved, then a quarter of them.
    """
    share = TAIL_TIME + (1.0 + TAIL_COST - TAIL_TIME) * TAIL_ENGINES
    return (
        sum(
            job.rollout_s.sum() * share * job.spec.rollout_nodes * prices.rollout
            + job.train_s.sum() * job.spec.train_nodes * prices.train
            for job in jobs
        )
        / 3600.0
    )
