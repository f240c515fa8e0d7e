"""What the scheduler wants done, in the imperative, in the order in which to do it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from rollpacker.core.codec import Tagged
from rollpacker.core.types import Phase

Reason = Literal["repack", "guard", "failure", "drain", "resume"]
"""Of a move."""


class AcquireNodes(Tagged, frozen=True, kw_only=True):
    """Take nodes from the provider; they cost money from now on."""

    nodes: tuple[str, ...]


class ReleaseNodes(Tagged, frozen=True, kw_only=True):
    """Give nodes back: nothing is pinned on them."""

    nodes: tuple[str, ...]


class Place(Tagged, frozen=True, kw_only=True):
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


class Permit(Tagged, frozen=True, kw_only=True):
    """Let a job run one phase on its nodes of that pool.

    Args:
        token: grows with every permit; whoever holds a lower one of the same job is out.
    """

    job: str
    phase: Phase
    token: int
    group: int
    epoch: int
    position: int
    nodes: tuple[str, ...]


class ReleaseTail(Tagged, frozen=True, kw_only=True):
    """Move the unfinished responses to a quarter of the workers; the nodes go to the next job."""

    job: str
    nodes: tuple[str, ...]


class Move(Tagged, frozen=True, kw_only=True):
    """Load a job, which is between iterations, on other nodes; report ``MoveFinished``.

    The state stays on the old nodes until then, unless they failed: then it comes from a
    checkpoint.

    Args:
        reason: ``repack`` saves money, ``guard`` saves the job's SLO, ``failure`` its life,
            ``drain`` empties a node, ``resume`` goes on after ``Suspend``.
    """

    job: str
    group: int
    epoch: int
    rollout: tuple[str, ...]
    train: tuple[str, ...]
    memory_gb: Mapping[str, float]
    reason: Reason


class Rebase(Tagged, frozen=True, kw_only=True):
    """A group's membership changed, and with it the order of its members.

    Args:
        order: the members by position.
    """

    group: int
    epoch: int
    order: tuple[str, ...]


class Wait(Tagged, frozen=True, kw_only=True):
    """A job has no nodes, and waits for some: ``Place`` or ``Move`` says when it has."""

    job: str


class Suspend(Tagged, frozen=True, kw_only=True):
    """A job that borrowed another team's nodes gives them back between two iterations, and waits.

    Its state goes to a checkpoint, and its promise counts no time until it goes on.
    """

    job: str
    group: int


class Depart(Tagged, frozen=True, kw_only=True):
    """A job is gone, and its memory with it; ``group`` None if it had no nodes."""

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
