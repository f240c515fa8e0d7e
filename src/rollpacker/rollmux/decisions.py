"""What the scheduler wants done, in the imperative, in the order in which to do it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from rollpacker.core.types import Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class AcquireNodes:
    """Take nodes from the provider; they cost money from now on."""

    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseNodes:
    """Give nodes back: nothing is pinned on them."""

    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Load a new job on its nodes, where it stays in host memory.

    Args:
        memory_gb: what it takes of each node.
        epoch: of the group, after the job has joined.
    """

    job: str
    group: int
    epoch: int
    rollout: tuple[str, ...]
    train: tuple[str, ...]
    memory_gb: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Permit:
    """Let a job run one phase on its nodes of that pool.

    Args:
        token: grows with every permit; whoever holds a lower one of the same job is out.
    """

    job: str
    phase: Phase
    token: int
    group: int
    epoch: int
    round: int
    position: int
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseTail:
    """Move the unfinished responses to a quarter of the workers; the nodes go to the next job."""

    job: str
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Load a job, which is between iterations, on other nodes; report ``MoveFinished``.

    The state stays on the old nodes until then, unless they failed: then it comes from a
    checkpoint.

    Args:
        reason: ``repack`` saves money, ``guard`` saves the job's SLO, ``failure`` its life.
    """

    job: str
    group: int
    epoch: int
    rollout: tuple[str, ...]
    train: tuple[str, ...]
    memory_gb: Mapping[str, float]
    reason: Literal["repack", "guard", "failure"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebase:
    """A group's membership changed: rounds count from zero again.

    Args:
        order: the members by position.
    """

    group: int
    epoch: int
    order: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Depart:
    """A job is gone, and its memory with it."""

    job: str
    group: int


Decision = AcquireNodes | ReleaseNodes | Place | Permit | ReleaseTail | Move | Rebase | Depart
