"""What the scheduler knows of a job: its specification, and what was observed of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

RING = 60
"""Iterations that are remembered."""
KNOWN_AFTER = 5
"""Observed iterations after which a job is planned by what was observed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """What a job asks for.

    Args:
        id: unique.
        rollout_nodes: gang size on the rollout pool.
        train_nodes: gang size on the training pool.
        worst_rollout_s: seconds of a rollout with every response at the cap, sync and warm
            switch included.
        worst_train_s: the same of a training phase.
        slo: allowed slowdown of the whole life against running alone; 1 or more.
        iterations: how many there will be; None where the user cannot say.
        expected_iterations: about how many, where the exact number is not known: for plans and
            forecasts; the job may stop before, or go on.
        rollout_memory_gb: host memory that stays taken on every rollout node.
        train_memory_gb: the same on every training node.
        owner: what a later start of the same job says too, so that it may take the job over.
        team: whose share of the nodes it takes.
        priority: the higher ones of a team go first.
        node_devices: devices that every node must have at least.
        rollout_labels: labels that every rollout node must have.
        train_labels: labels that every training node must have.
        slo_since: when the promise begins: with ``admission``, or with ``submission``, so that
            waiting uses it up.
        too_large: what to do with a gang that all nodes together are too few for: ``refuse`` it,
            or let it ``wait`` for more nodes.
    """

    id: str
    worst_rollout_s: float
    worst_train_s: float
    rollout_nodes: int = 1
    train_nodes: int = 1
    slo: float = 1.5
    iterations: int | None = None
    expected_iterations: int | None = None
    rollout_memory_gb: float = 150.0
    train_memory_gb: float = 250.0
    owner: str = ""
    team: str = ""
    priority: int = 0
    node_devices: int = 1
    rollout_labels: Mapping[str, str] = field(default_factory=dict[str, str])
    train_labels: Mapping[str, str] = field(default_factory=dict[str, str])
    slo_since: Literal["admission", "submission"] = "admission"
    too_large: Literal["refuse", "wait"] = "refuse"

    def __post_init__(self) -> None:
        """Raises ``ValueError`` on what no scheduler could honour."""
        if not self.id:
            raise ValueError("job: id must not be empty")
        if min(self.rollout_nodes, self.train_nodes) < 1:
            raise ValueError(f"job {self.id}: rollout_nodes and train_nodes must be 1 or more")
        if not (0 < self.worst_rollout_s < 1e9 and 0 < self.worst_train_s < 1e9):
            raise ValueError(
                f"job {self.id}: worst_rollout_s and worst_train_s must be positive seconds"
            )
        if not 1.0 <= self.slo < 1e6:
            raise ValueError(f"job {self.id}: slo is a slowdown of 1 or more, got {self.slo}")
        for name in ("iterations", "expected_iterations"):
            if (count := getattr(self, name)) is not None and count < 1:
                raise ValueError(f"job {self.id}: {name} must be 1 or more")
        if self.node_devices < 1:
            raise ValueError(f"job {self.id}: node_devices must be 1 or more")

    @property
    def gangs(self) -> tuple[int, int]:
        """Nodes of either pool that it asks for."""
        return self.rollout_nodes, self.train_nodes

    def left(self, done: int) -> int | None:
        """Iterations to come after so many; None where nobody can say, as of a job that goes on
        though more are done than were expected."""
        if self.iterations is not None:
            return self.iterations - done
        if self.expected_iterations is None or done >= self.expected_iterations:
            return None
        return self.expected_iterations - done

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> JobSpec:
        """From a JSON object. Raises ``ValueError`` on an unknown or missing key."""
        unknown = set(data) - set(cls.__slots__)
        if unknown:
            raise ValueError(f"job: unknown key {sorted(unknown)[0]!r}")
        try:
            return cls(**data)
        except TypeError as error:
            raise ValueError(f"job {data.get('id')}: {error}") from error


def host_memory_gb(
    parameters_b: float, *, tensor_parallel: int = 8, train_nodes: int = 1
) -> tuple[float, float]:
    """Host memory in GB of a rollout node and of a training node.

    bf16 weights once per engine of ``tensor_parallel`` devices of eight, and 18 bytes a parameter
    of training state over the training nodes, each with 100 GB of processes and caches.
    """
    rollout = 100.0 + 2.0 * parameters_b * 8 / tensor_parallel
    return rollout, 100.0 + 18.0 * parameters_b / train_nodes


@dataclass(slots=True)
class Observed:
    """The last ``RING`` iterations of a job.

    Args:
        ring: rollout and training seconds of each, alone.
        count: iterations that ever were.
        means: of both over the ring; only once something was seen.
    """

    ring: list[tuple[float, float]] = field(default_factory=list)
    count: int = 0
    means: tuple[float, float] = (0.0, 0.0)

    def add(self, rollout_s: float, train_s: float) -> None:
        """One more iteration."""
        self.ring.append((rollout_s, train_s))
        del self.ring[:-RING]
        self.count += 1
        rollout, train = zip(*self.ring, strict=True)
        self.means = (sum(rollout) / len(rollout), sum(train) / len(train))

    @property
    def known(self) -> bool:
        """Whether enough was seen to plan by it."""
        return self.count >= KNOWN_AFTER
