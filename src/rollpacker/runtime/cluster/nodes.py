"""The machines of a run, and the start of workers on them."""

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

# On Linux, workers are forked off a process that has imported their modules. With two workers this
# halves the CPU time of a start, and restarted workers need not wait for imports. On other systems,
# libraries cannot be forked safely.
_START = "forkserver" if sys.platform == "linux" else "spawn"
PRELOADED = ("rollpacker.runtime.worker.preload",)
_LEAVING_S = 5.0
"""Seconds for a process to end after it has closed its socket."""
_LOOK_S = 0.01
"""Seconds between two polls of a process."""


class StartedWorker(Protocol):
    """A worker's process, or its part of one. ``kill`` ends it, stopped or not."""

    @property
    def pid(self) -> int | None: ...

    @property
    def sentinel(self) -> int: ...

    @property
    def exitcode(self) -> int | None: ...

    def join(self, timeout: float | None = None, /) -> None: ...

    def kill(self) -> None: ...


Start = Callable[[Sequence[WorkerSpec], Sequence[socket.socket]], Sequence[StartedWorker]]
"""Starts workers on one machine, each with a copy of its connection. Can be pickled."""


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
        self._process.kill()
        self.link.sever()

    async def end(self, seconds: float = _LEAVING_S) -> str:
        """How it ended, after at most ``seconds``."""
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
        preloaded.append("rollpacker.engine.vllm")  # its import looks for devices
    multiprocessing.set_forkserver_preload(preloaded)
    context = multiprocessing.get_context(_START)
    processes: list[BaseProcess] = [
        context.Process(
            target=main, args=(Wire(end), spec), name=f"worker-{spec.rank}", daemon=True
        )
        for spec, end in zip(specs, ends, strict=True)
    ]
    with shielded():
        # Otherwise the first process starts it, which unblocks signals.
        resource_tracker.ensure_running()
        for process in processes:
            process.start()
    return processes


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A machine of a run. ``folder``: a folder on it for this run. Names in shared memory begin
    with the folder's name. ``elsewhere``: whether its clock is not the driver's."""

    number: int
    places: tuple[Place, ...]
    folder: Path
    elsewhere: bool = False


class Nodes(ABC):
    """The driver's view of a run's machines. The defaults are for one machine, the driver's."""

    @abstractmethod
    async def gather(self) -> Sequence[Node]:
        """Wait for all nodes. Later calls return the same nodes. Raises ``ValueError`` for the
        user's mistakes, ``WorkerError`` otherwise."""

    @abstractmethod
    def start(self, specs: Mapping[int, Sequence[WorkerSpec]]) -> Mapping[int, Host]:
        """Start workers, given by node. Returns each one's host by its rank."""

    @property
    def lost(self) -> Collection[int]:
        return ()

    def regain(self) -> Mapping[int, Node]:
        """Continue to replace lost nodes. Returns those that have come since the last call. Raises
        ``ValueError`` or ``WorkerError`` for a failed node, and the next call tries again."""
        return {}

    def fence(self, stop_at: float | None) -> None:  # noqa: B027
        """Let workers on other machines run until ``stop_at``, in the driver's monotonic seconds. A
        time in the past stops them. None lets them run."""

    def store(self) -> str:
        """The prefix of addresses at which processes of different nodes meet (``Span``)."""
        return ""

    @abstractmethod
    def close(self) -> None:
        """Release everything. May be called again."""


class ThisMachine(Nodes):
    """The driver's own machine."""

    def __init__(self, config: RunConfig, start: Start = start_processes) -> None:
        self._config = config
        self._start = start
        self._memory = SharedMemoryOwner()

    async def gather(self) -> Sequence[Node]:
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
