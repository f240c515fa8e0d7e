"""The scheduler's knobs."""

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
class Team:
    """Who owns a part of the nodes. Others may borrow what it does not use.

    Args:
        rollout: rollout nodes that it is guaranteed.
        train: training nodes that it is guaranteed.
    """

    name: str
    rollout: float = 0.0
    train: float = 0.0

    def __post_init__(self) -> None:
        """Raises ``ValueError`` on negative shares."""
        if not self.name or min(self.rollout, self.train) < 0:
            raise ValueError(f"team {self.name!r}: needs a name, and nodes of 0 or more")

    @property
    def guaranteed(self) -> tuple[float, float]:
        return self.rollout, self.train


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How to schedule.

    Args:
        lifetime: budget the slowdown over a job's whole life, and evict before it is lost; off, a
            job joins where the worst case of all members stays under every limit, and stays there.
        repack: move jobs and dissolve groups where that saves money.
        tails: let the next job start while a rollout's last responses finish on a quarter of the
            workers.
        group_size: most jobs of a group.
        memory_cap_gb: host memory of a node.
        cold_s: seconds to load a job on other nodes.
        warm_s: seconds to switch a node to a job that is in its host memory.
        margin: share of every slowdown budget that plans leave alone.
        effort: of searching in one decision; a unit is about a millisecond of a slow core.
        look_s: seconds after which repacking looks at a job again though nothing happened.
        backfill: jobs that wait may overtake those that do not fit yet, as long as these do not
            start later for it.
        patience_s: who waits for longer goes before every other new job.
        teams: guaranteed shares; jobs of other teams have none.
        nodes: ``cloud`` ones are rented, as many as are needed; ``named`` ones are there.
        limit: most nodes of either pool that a cloud gives; None for no limit.
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
