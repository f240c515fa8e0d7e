"""The scheduler's decisions. Carry them out in their order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from rollpacker.core.codec import Tagged
from rollpacker.core.types import Phase

Reason = Literal["repack", "guard", "failure", "drain", "resume"]


class AcquireNodes(Tagged, frozen=True, kw_only=True):
    """Take nodes from the provider. They cost money from now on."""

    nodes: tuple[str, ...]


class ReleaseNodes(Tagged, frozen=True, kw_only=True):
    """Give back nodes on which nothing is pinned."""

    nodes: tuple[str, ...]


class Place(Tagged, frozen=True, kw_only=True):
    """Load a new job on its nodes, where it stays in host memory. ``epoch`` includes the job."""

    job: str
    group: int
    epoch: int
    rollout: tuple[str, ...]
    train: tuple[str, ...]
    memory_gb: Mapping[str, float]


class Permit(Tagged, frozen=True, kw_only=True):
    """Let a job run one phase on its nodes. Permits with a lower ``token`` are void."""

    job: str
    phase: Phase
    token: int
    group: int
    epoch: int
    position: int
    nodes: tuple[str, ...]


class ReleaseTail(Tagged, frozen=True, kw_only=True):
    """Move the unfinished responses to a quarter of the workers. The next job gets the nodes."""

    job: str
    nodes: tuple[str, ...]


class Move(Tagged, frozen=True, kw_only=True):
    """Load a job on other nodes between two iterations, then report ``MoveFinished``.

    Until then the state stays on the old nodes. If these failed, it comes from a checkpoint.

    Args:
        reason: ``repack`` saves money, ``guard`` keeps the SLO, ``failure`` replaces a lost node,
            ``drain`` empties a node, ``resume`` continues after ``Suspend``.
    """

    job: str
    group: int
    epoch: int
    rollout: tuple[str, ...]
    train: tuple[str, ...]
    memory_gb: Mapping[str, float]
    reason: Reason


class Rebase(Tagged, frozen=True, kw_only=True):
    """A group's members, or their order (``order``, by position), have changed."""

    group: int
    epoch: int
    order: tuple[str, ...]


class Wait(Tagged, frozen=True, kw_only=True):
    """A job waits for nodes, until ``Place`` or ``Move``."""

    job: str


class Suspend(Tagged, frozen=True, kw_only=True):
    """A job gives borrowed nodes back to their team between two iterations, and waits.

    Its state goes to a checkpoint. Its SLO counts no time until it continues.
    """

    job: str
    group: int


class Depart(Tagged, frozen=True, kw_only=True):
    """A job and its memory are gone. ``group`` is None if it had no nodes."""

    job: str
    group: int | None


Decision = (
    AcquireNodes
    | ReleaseNodes
    | Place
    | Permit
    | ReleaseTail
    | Move
    | Rebase
    | Wait
    | Suspend
    | Depart
)
