"""The machines that a run has, and how its workers come to run on them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rollpacker.config import RunConfig
from rollpacker.runtime.cluster.devices import Place, worker_devices
from rollpacker.runtime.cluster.local import Start, start_local, start_processes
from rollpacker.runtime.ipc.link import Host
from rollpacker.runtime.messages.shared_weights import Belongings
from rollpacker.runtime.worker.worker import WorkerSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A machine of a run.

    Args:
        number: among the run's.
        places: its devices.
        folder: on it, of this run alone: its name begins whatever the run keeps in its shared
            memory, and what its processes meet at is inside.
        elsewhere: its clock is not the driver's.
    """

    number: int
    places: tuple[Place, ...]
    folder: Path
    elsewhere: bool = False


class Nodes(Protocol):
    """The machines of a run, from the driver's side."""

    async def gather(self) -> Sequence[Node]:
        """Wait for all of them; may be called again, for the same answer.

        Raises ``ValueError`` for the user's mistakes, ``WorkerError`` otherwise.
        """
        ...

    def start(self, specs: Mapping[int, Sequence[WorkerSpec]]) -> Mapping[int, Host]:
        """Start workers, given by node; each one's host by its number."""
        ...

    @property
    def lost(self) -> Collection[int]:
        """Those that are gone, by number."""
        ...

    def regain(self) -> Mapping[int, Node]:
        """Begin to bring back those that are gone, and go on with it; which have come since the
        last call.

        Raises ``ValueError`` or ``WorkerError`` for one that did not; the next call asks anew.
        """
        ...

    def fence(self, stop_at: float | None) -> None:
        """Workers on other machines may run until then, in monotonic seconds of the driver's; a
        time that is over stops them. None lets them run."""
        ...

    def store(self) -> str:
        """Where processes of different nodes meet: the beginning of such names (``Span``)."""
        ...

    def close(self) -> None:
        """Nobody is needed any more; may be called again."""
        ...


class ThisMachine:
    """One machine, the driver's own.

    Args:
        config: the run's.
        start: starts its workers.
    """

    def __init__(self, config: RunConfig, start: Start = start_processes) -> None:
        self._config = config
        self._start = start
        self._belongings = Belongings()

    async def gather(self) -> Sequence[Node]:
        """At once. Raises ``ValueError`` where there are too few devices."""
        places = tuple(worker_devices(self._config))
        return [Node(number=0, places=places, folder=self._belongings.folder)]

    def start(self, specs: Mapping[int, Sequence[WorkerSpec]]) -> Mapping[int, Host]:
        (mine,) = specs.values()
        hosts = start_local(mine, self._start)
        return {spec.rank: host for spec, host in zip(mine, hosts, strict=True)}

    @property
    def lost(self) -> Collection[int]:
        """This run would be gone, too."""
        return ()

    def regain(self) -> Mapping[int, Node]:
        return {}

    def fence(self, stop_at: float | None) -> None:
        """There is no other machine."""

    def store(self) -> str:
        return ""

    def close(self) -> None:
        """Remove what the run kept in shared memory."""
        self._belongings.remove()
