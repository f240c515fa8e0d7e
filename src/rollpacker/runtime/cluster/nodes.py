"""The machines that a run has, and how its workers come to run on them."""

from __future__ import annotations

import asyncio
import multiprocessing
import socket
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Protocol

from rollpacker.config import RunConfig
from rollpacker.processes.children import allow_files, shielded
from rollpacker.runtime.cluster.devices import Place, worker_devices
from rollpacker.runtime.ipc.link import Host, Link, Wire
from rollpacker.runtime.messages.shared_weights import SharedMemoryOwner
from rollpacker.runtime.worker.worker import WorkerSpec
from rollpacker.runtime.worker.worker_process import main

# Workers are forked off a process that has imported what all of them need: half of the start's CPU
# time with two of them, and no imports are waited for when a job that lost its nodes starts again.
# The libraries of other systems are not made to be forked.
_START = "forkserver" if sys.platform == "linux" else "spawn"
PRELOADED = ("rollpacker.runtime.worker.preload",)
_LEAVING_S = 5.0
"""In which a process that has closed its socket is gone."""
_LOOK_S = 0.01
"""Between two looks at one that may be."""


class StartedWorker(Protocol):
    """What a worker runs in, for whoever has started it: a ``multiprocessing`` process, or a part
    of one. Nobody waits after ``kill``, which ends it, stopped or not."""

    @property
    def pid(self) -> int | None: ...

    @property
    def sentinel(self) -> int: ...

    @property
    def exitcode(self) -> int | None: ...

    def join(self, timeout: float | None = None, /) -> None: ...

    def kill(self) -> None: ...


Start = Callable[[Sequence[WorkerSpec], Sequence[socket.socket]], Sequence[StartedWorker]]
"""Starts workers of one machine, each with the end of a connection to its driver, of which it takes
a copy. Pickles: an agent may be the one that calls it."""


class LocalHost:
    """A worker beside its driver."""

    def __init__(self, link: Link, process: StartedWorker) -> None:
        self.link = link
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid or 0

    def wait(self, seconds: float) -> None:
        self._process.join(seconds)

    def kill(self) -> None:
        """Both ends of its link see it."""
        self._process.kill()
        self.link.sever()

    async def end(self, seconds: float = _LEAVING_S) -> str:
        """How it ended, in words; it has so many seconds for that."""
        until = time.monotonic() + seconds
        while (code := self._process.exitcode) is None and time.monotonic() < until:
            await asyncio.sleep(_LOOK_S)
        return "its connection closed" if code is None else f"exit code {code}"


def start_processes(
    specs: Sequence[WorkerSpec], ends: Sequence[socket.socket]
) -> list[BaseProcess]:
    """Start a process for each worker (``Start``)."""
    preloaded: list[str] = [*PRELOADED]
    if all(spec.device == "cpu" and spec.config.engine.kind == "vllm" for spec in specs):
        preloaded.append("rollpacker.engine.vllm")  # which asks for devices
    multiprocessing.set_forkserver_preload(preloaded)
    context = multiprocessing.get_context(_START)
    processes: list[BaseProcess] = [
        context.Process(
            target=main, args=(Wire(end), spec), name=f"worker-{spec.rank}", daemon=True
        )
        for spec, end in zip(specs, ends, strict=True)
    ]
    with shielded():
        # It comes with the first process otherwise, and unblocks signals as it does.
        resource_tracker.ensure_running()
        for process in processes:
            process.start()
    return processes


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


class Nodes(ABC):
    """The machines of a run, from the driver's side; by itself one that the driver is on."""

    @abstractmethod
    async def gather(self) -> Sequence[Node]:
        """Wait for all of them; may be called again, for the same answer.

        Raises ``ValueError`` for the user's mistakes, ``WorkerError`` otherwise.
        """

    @abstractmethod
    def start(self, specs: Mapping[int, Sequence[WorkerSpec]]) -> Mapping[int, Host]:
        """Start workers, given by node; each one's host by its number."""

    @property
    def lost(self) -> Collection[int]:
        """Those that are gone, by number."""
        return ()

    def regain(self) -> Mapping[int, Node]:
        """Begin to bring back those that are gone, and go on with it; which have come since the
        last call.

        Raises ``ValueError`` or ``WorkerError`` for one that did not; the next call asks anew.
        """
        return {}

    def fence(self, stop_at: float | None) -> None:  # noqa: B027
        """Workers on other machines may run until then, in monotonic seconds of the driver's; a
        time that is over stops them. None lets them run."""

    def store(self) -> str:
        """Where processes of different nodes meet: the beginning of such names (``Span``)."""
        return ""

    @abstractmethod
    def close(self) -> None:
        """Nobody is needed any more; may be called again."""


class ThisMachine(Nodes):
    """One machine, the driver's own."""

    def __init__(self, config: RunConfig, start: Start = start_processes) -> None:
        self._config = config
        self._start = start
        self._memory = SharedMemoryOwner()

    async def gather(self) -> Sequence[Node]:
        """At once. Raises ``ValueError`` where there are too few devices."""
        places = tuple(worker_devices(self._config))
        return [Node(number=0, places=places, folder=self._memory.folder)]

    def start(self, specs: Mapping[int, Sequence[WorkerSpec]]) -> Mapping[int, Host]:
        (mine,) = specs.values()
        allow_files(2 * len(mine))
        pairs = [socket.socketpair() for _ in mine]
        links = [Link(ours) for ours, _ in pairs]
        started = self._start(mine, [theirs for _, theirs in pairs])
        for _, theirs in pairs:
            theirs.close()
        hosts = map(LocalHost, links, started)
        return {spec.rank: host for spec, host in zip(mine, hosts, strict=True)}

    def close(self) -> None:
        self._memory.remove()
