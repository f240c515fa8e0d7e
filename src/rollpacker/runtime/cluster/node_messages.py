"""What the driver and the agents of a cluster's nodes say to each other.

Besides these ``Stop``, ``Died`` and, of the driver, ``Beat``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rollpacker.config import RunConfig
from rollpacker.runtime.cluster.devices import Place
from rollpacker.runtime.cluster.local import Start
from rollpacker.runtime.worker.worker import WorkerSpec


@dataclass(frozen=True, kw_only=True)
class Welcome:
    """This is the run; ``mark``: a file of its folder that every node has to see, and what it holds
    (a node's own disk may have another of that name)."""

    config: RunConfig
    mark: tuple[Path, str]


@dataclass(frozen=True, kw_only=True)
class Arrived:
    """Of an agent: its devices, the run's folder on its node, and the node's address."""

    places: tuple[Place, ...]
    folder: str
    address: str


@dataclass(frozen=True, kw_only=True)
class AgentAlive:
    """Of an agent: a sign of life, with what its clock says, in monotonic seconds."""

    clock: float


@dataclass(frozen=True, kw_only=True)
class Until:
    """Workers may run until then, by the agent's clock; after it they stand still until they may
    run again. None: as long as they like."""

    stop_at: float | None


@dataclass(frozen=True, kw_only=True)
class Spawn:
    """Start these workers with ``start``; each comes to the driver's gate."""

    specs: Sequence[WorkerSpec]
    start: Start


@dataclass(frozen=True, kw_only=True)
class Kill:
    """End a worker at once, stopped or not."""

    worker: int


@dataclass(frozen=True, kw_only=True)
class WorkerEnded:
    """Of an agent: a worker has ended, with this exit code."""

    worker: int
    code: int | None
