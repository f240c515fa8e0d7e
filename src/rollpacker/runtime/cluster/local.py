"""Workers as processes of this machine."""

from __future__ import annotations

import asyncio
import multiprocessing
import socket
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing import resource_tracker
from typing import Protocol

from rollpacker.processes.children import allow_files, shielded
from rollpacker.runtime.ipc.link import Link, Wire
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
    """What a worker runs in, for whoever has started it."""

    @property
    def pid(self) -> int: ...

    @property
    def sentinel(self) -> int:
        """Readable when the process has ended."""
        ...

    @property
    def ended(self) -> bool:
        """Whether the process has, or the worker in it was given up."""
        ...

    def wait(self, seconds: float) -> None:
        """Give the process so long to end."""
        ...

    def kill(self) -> None:
        """End the worker, and its process if nobody else is in it; nobody waits for that."""
        ...

    def exit_code(self) -> int | None:
        """The process's own, or the signal that it died of, negative; None while it goes on."""
        ...


Start = Callable[[Sequence[WorkerSpec], Sequence[socket.socket]], Sequence[StartedWorker]]
"""Starts workers of one machine, each with the end of a connection to its driver, of which it takes
a copy. Pickles: an agent may be the one that calls it."""


class WorkerProcess:
    """A worker on this machine, which may have its driver elsewhere.

    Args:
        spec: what it is.
        end: of a connection to its driver; a copy of it goes to the process.
    """

    def __init__(self, spec: WorkerSpec, end: socket.socket) -> None:
        self._process = multiprocessing.get_context(_START).Process(
            target=main, args=(Wire(end), spec), name=f"worker-{spec.rank}", daemon=True
        )
        with shielded():
            self._process.start()

    @property
    def pid(self) -> int:
        return self._process.pid or 0

    @property
    def sentinel(self) -> int:
        """Readable when it has ended."""
        return self._process.sentinel

    @property
    def ended(self) -> bool:
        return self._process.exitcode is not None

    def wait(self, seconds: float) -> None:
        """Give it so long to end."""
        self._process.join(seconds)

    def kill(self) -> None:
        """End it, stopped or not; nobody waits for that."""
        # It takes no SIGTERM, so the interpreter's own end would wait for it for ever.
        self._process.kill()

    def exit_code(self) -> int | None:
        """Its own, or the signal that it died of, negative; None while it goes on."""
        return self._process.exitcode


class LocalHost:
    """A worker beside its driver.

    Args:
        link: to it.
        started: what it runs in.
    """

    def __init__(self, link: Link, started: StartedWorker) -> None:
        self.link = link
        self._started = started

    @property
    def pid(self) -> int:
        return self._started.pid

    def wait(self, seconds: float) -> None:
        """Give it so long to end."""
        self._started.wait(seconds)

    def kill(self) -> None:
        """End it, stopped or not; both ends of its link see it."""
        self._started.kill()
        self.link.sever()

    async def end(self, seconds: float = _LEAVING_S) -> str:
        """How it ended, in words; it has so many seconds for that."""
        until = time.monotonic() + seconds
        while not self._started.ended and time.monotonic() < until:
            await asyncio.sleep(_LOOK_S)
        code = self._started.exit_code()
        return "its connection closed" if code is None else f"exit code {code}"


def start_processes(
    specs: Sequence[WorkerSpec], ends: Sequence[socket.socket]
) -> list[WorkerProcess]:
    """Start a process for each worker (``Start``)."""
    prepare_start(specs)
    return [WorkerProcess(spec, end) for spec, end in zip(specs, ends, strict=True)]


def start_local(specs: Sequence[WorkerSpec], start: Start = start_processes) -> list[LocalHost]:
    """Start workers beside their driver."""
    allow_files(2 * len(specs))
    pairs = [socket.socketpair() for _ in specs]
    links = [Link(ours) for ours, _ in pairs]
    begun = start(specs, [theirs for _, theirs in pairs])
    for _, theirs in pairs:
        theirs.close()
    return [LocalHost(link, started) for link, started in zip(links, begun, strict=True)]


def prepare_start(specs: Sequence[WorkerSpec]) -> None:
    """What is done once, before the first of these workers starts."""
    with shielded():
        # It comes with the first process otherwise, and unblocks signals as it does.
        resource_tracker.ensure_running()
    preloaded: list[str] = [*PRELOADED]
    if all(spec.device == "cpu" and spec.config.engine.kind == "vllm" for spec in specs):
        preloaded.append("rollpacker.engine.vllm")  # which asks for devices
    multiprocessing.set_forkserver_preload(preloaded)
