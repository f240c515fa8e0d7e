"""The scheduler's knobs, with the published algorithm and ours as two settings of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Dollars per hour of a node of 8 GPUs."""

    rollout: float = 14.8
    """H20."""
    train: float = 42.24
    """H800."""

    def of(self, nodes: Sequence[float]) -> float:
        """Dollars per hour of so many nodes of either pool, or dollars of so many node-hours."""
        return nodes[0] * self.rollout + nodes[1] * self.train


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How to schedule.

    Args:
        permits: order of the phases inside a group.
        lifetime: budget the slowdown over a job's whole life and evict before it is lost; off,
            a group's worst-case cycle has to stay under every member's limit, as published.
        learn: plan by observed durations once a job is known.
        repack: move jobs and dissolve groups where that saves money.
        tails: let the next job start while a rollout's last responses finish on a quarter of the
            workers.
        elastic: gangs may shrink to what their job allows.
        group_size: most jobs of a group.
        memory_cap_gb: host memory of a node.
        cold_s: seconds to load a job on other nodes.
        warm_s: seconds to switch a node to a job that is in its host memory.
        margin: share of every slowdown budget that plans leave alone.
        effort: of searching in one decision; a unit is about a millisecond of a slow core.
        look_s: seconds after which repacking looks at a job again though nothing happened.
    """

    permits: Literal["round_robin", "earliest_deadline"] = "earliest_deadline"
    lifetime: bool = True
    learn: bool = True
    repack: bool = True
    tails: bool = True
    elastic: bool = False
    group_size: int = 8
    memory_cap_gb: float = 1536.0
    cold_s: float = 110.0
    warm_s: float = 2.0
    margin: float = 0.0
    effort: float = 6.0
    look_s: float = 7200.0
    prices: Prices = Prices()


PLAIN = Settings(permits="round_robin", lifetime=False, learn=False, repack=False)
"""The published algorithm."""
