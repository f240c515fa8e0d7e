"""The scheduler's settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Dollars per hour of a node of 8 GPUs."""

    rollout: float = 14.8  # of an H20 node
    train: float = 42.24  # of an H800 node

    def of(self, nodes: Sequence[float]) -> float:
        """Dollars per hour for a node count of each pool, or dollars for node-hours."""
        return nodes[0] * self.rollout + nodes[1] * self.train


@dataclass(frozen=True, slots=True, kw_only=True)
class Team:
    """A team with guaranteed nodes of each pool. Others may borrow its unused ones."""

    name: str
    rollout: float = 0.0
    train: float = 0.0

    def __post_init__(self) -> None:
        """Raises ``ValueError`` on an empty name or a negative share."""
        if not self.name or min(self.rollout, self.train) < 0:
            raise ValueError(f"team {self.name!r}: needs a name and node counts of 0 or more")

    @property
    def guaranteed(self) -> tuple[float, float]:
        return self.rollout, self.train


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of the scheduler.

    Args:
        lifetime: budget the slowdown over a job's life, and evict before it is lost. If off, a job
            joins only if every member's worst case meets its limit, and stays.
        repack: move jobs and dissolve groups if that saves money.
        tails: start the next job while the last responses finish on a quarter of the workers.
        group_size: most jobs of a group.
        memory_cap_gb: host memory of a node.
        cold_s: seconds to load a job on other nodes.
        warm_s: seconds to switch a node to a job that is in its host memory.
        margin: share of every slowdown budget that plans do not use.
        effort: search effort of a decision. A unit is about a millisecond of a slow core.
        look_s: seconds after which repacking looks at an idle job again.
        backfill: waiting jobs may overtake earlier ones that do not fit, without delaying them.
        patience_s: a job that waits longer goes before every other new job.
        teams: guaranteed shares. Other teams have none.
        nodes: ``cloud`` nodes are rented as needed. ``named`` nodes are machines of the owner.
        limit: most nodes of each pool that a cloud gives (None for no limit).
    """

    lifetime: bool = True
    repack: bool = True
    tails: bool = True
    group_size: int = 8
    memory_cap_gb: float = 1536.0
    cold_s: float = 110.0
    warm_s: float = 2.0
    margin: float = 0.0
    effort: float = 6.0
    look_s: float = 7200.0
    backfill: bool = True
    patience_s: float = 86_400.0
    teams: tuple[Team, ...] = ()
    nodes: Literal["cloud", "named"] = "cloud"
    limit: tuple[int | None, int | None] = (None, None)
    prices: Prices = Prices()
