"""What the driver and the agents of a cluster's nodes say to each other.

Besides these ``Stop``, ``Died`` and, of the driver, ``Beat``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollpacker.config import RunConfig
from rollpacker.runtime.cluster.devices import Place
from rollpacker.runtime.cluster.local import Start
from rollpacker.runtime.worker.worker import WorkerSpec


@dataclass(frozen=True, kw_only=True)
class Welcome:
    """This is the run."""

    config: RunConfig


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


@dataclass(frozen=True, kw_only=True)
class Look:
    """Say (``Seen``) whether there is a file ``marker``: then both see the disk that it is on."""

    marker: str


@dataclass(frozen=True, kw_only=True)
class Seen:
    """Of an agent: whether it is there."""

    marker: str
    there: bool


@dataclass(frozen=True, kw_only=True)
class MoveFolder:
    """Bring the driver's folder to ``folder`` on the node, or (``out``) this one to the driver's,
    and remove it; over a connection under the name ``key``. Answered by ``FolderMoved``."""

    key: str
    folder: str
    out: bool


@dataclass(frozen=True, kw_only=True)
class FolderMoved:
    """Of an agent: it is done; ``problem``: why not."""

    key: str
    problem: str = ""
