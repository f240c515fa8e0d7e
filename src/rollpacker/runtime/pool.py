"""The local worker processes: start, talk to, notice the death of."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

from rollpacker.config import RunConfig, WorkersConfig
from rollpacker.core.types import WorkerId
from rollpacker.engine.base import EngineInfo
from rollpacker.reward.shield import shielded
from rollpacker.runtime import messages as msg
from rollpacker.runtime import worker as worker_process

_CLOSE_S = 3.0
"""In which workers should have left; what they do then is of no use to anybody."""


class WorkerError(RuntimeError):
    """A worker has died or cannot do what it was told."""


class WorkerPool:
    """Processes of one run, by worker id.

    ``on_report(worker, report)`` is called for every message, ``on_lost(worker, error)`` once for
    a worker whose process has died. ``info`` is known once they have started.
    """

    info: EngineInfo

    def __init__(self, config: RunConfig, *, max_length: int, total_updates: int) -> None:
        self._config = config
        self._max_length = max_length
        self._total_updates = total_updates
        self._connections: dict[WorkerId, Connection] = {}
        self._processes: dict[WorkerId, BaseProcess] = {}
        self._loop = asyncio.get_running_loop()
        self._answers: dict[WorkerId, asyncio.Future[msg.Report]] = {}
        self._meetings = tempfile.TemporaryDirectory(prefix="rollpacker-")
        self._generation = 0
        self._met: tuple[WorkerId, ...] = ()
        self.on_report: Callable[[WorkerId, msg.Report], None] = lambda _worker, _report: None
        self.on_lost: Callable[[WorkerId, str], None] = lambda _worker, _error: None

    @property
    def workers(self) -> tuple[WorkerId, ...]:
        """Ids of the live workers."""
        return tuple(self._connections)

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the live workers."""
        return tuple(self._processes[worker].pid or 0 for worker in self._connections)

    async def start(self) -> None:
        """Start all workers and wait for their models.

        Raises ``ValueError`` for the user's mistakes (a wrong model), ``WorkerError`` otherwise.
        """
        devices = worker_devices(self._config)
        context = multiprocessing.get_context("spawn")
        with shielded():
            # It comes with the first process otherwise, and unblocks signals as it does.
            resource_tracker.ensure_running()
        for rank, (device, cores) in enumerate(devices):
            spec = worker_process.WorkerSpec(
                config=self._config,
                rank=rank,
                cores=cores,
                device=device,
                max_length=self._max_length,
                total_updates=self._total_updates,
            )
            ours, theirs = context.Pipe()
            process = context.Process(
                target=worker_process.main, args=(theirs, spec), name=f"worker-{rank}", daemon=True
            )
            worker = WorkerId(rank)
            with shielded():
                process.start()
                self._connections[worker], self._processes[worker] = ours, process
            theirs.close()
            self._loop.add_reader(ours.fileno(), self._read, worker)
        ready, *_ = await asyncio.gather(*self._expect(self.workers).values())
        assert isinstance(ready, msg.Ready)
        self.info = ready.info
        self.meet()

    def meet(self) -> None:
        """Let the live workers form one process group, the lowest id first, if one has died."""
        if self._met == self.workers:
            return
        self._met = self.workers
        self._generation += 1
        place = str(Path(self._meetings.name) / f"generation-{self._generation}")
        world = len(self._connections)
        for rank, worker in enumerate(self.workers):
            self.send(worker, msg.Reform(rank=rank, world=world, rendezvous=place))

    def send(self, worker: WorkerId, command: msg.Command) -> None:
        """Send a command; a dead worker is noticed by its closed pipe, not here."""
        connection = self._connections.get(worker)
        if connection is not None:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.send(command)

    def broadcast(self, command: msg.Command) -> None:
        """Send a command to every live worker."""
        for worker in self.workers:
            self.send(worker, command)

    async def ask(self, command: msg.Save | msg.Load, workers: Sequence[WorkerId]) -> None:
        """Send a command and wait until it is done.

        Raises ``ValueError`` for the user's mistakes, ``OSError`` and ``WorkerError`` otherwise.
        """
        if not workers or not set(workers) <= set(self.workers):
            raise WorkerError("a worker died before it could be asked")
        answers = self._expect(workers)
        for worker in workers:
            self.send(worker, command)
        for done in await asyncio.gather(*answers.values()):
            assert isinstance(done, msg.Done)
            if done.error:
                raise (ValueError if done.user_error else OSError)(done.error)

    def _expect(self, workers: Sequence[WorkerId]) -> dict[WorkerId, asyncio.Future[msg.Report]]:
        answers = {worker: self._loop.create_future() for worker in workers}
        self._answers.update(answers)
        return answers

    def _read(self, worker: WorkerId) -> None:
        connection = self._connections[worker]
        try:
            # One message a call: asking for more costs as much as being called again.
            report = connection.recv()
        except (EOFError, ConnectionResetError):
            self._forget(worker, None)
        else:
            self._dispatch(worker, report)

    def _dispatch(self, worker: WorkerId, report: msg.Report) -> None:
        match report:
            case msg.Died():
                self._forget(worker, report)
            case msg.Ready() | msg.Done():
                self._answers.pop(worker).set_result(report)
            case _:
                self.on_report(worker, report)

    def _forget(self, worker: WorkerId, died: msg.Died | None) -> None:
        connection = self._connections.pop(worker)
        self._loop.remove_reader(connection.fileno())
        connection.close()
        process = self._processes[worker]
        process.join(timeout=5)
        error = died.error if died else f"exit code {process.exitcode}"
        text = f"worker {worker} died: {error}"
        waiting = self._answers.pop(worker, None)
        if waiting is not None:
            user = died is not None and died.user_error
            waiting.set_exception(ValueError(error) if user else WorkerError(text))
        self.on_lost(worker, text)

    def close(self) -> None:
        """Stop all workers; those that do not listen are killed."""
        try:
            for worker in self.workers:
                self.send(worker, msg.Stop())
                self._loop.remove_reader(self._connections[worker].fileno())
            until = time.monotonic() + _CLOSE_S
            for process in self._processes.values():
                process.join(max(0.0, until - time.monotonic()))
        finally:
            # They take no SIGTERM, so the interpreter's own end would wait for them for ever.
            with shielded():
                for process in self._processes.values():
                    process.kill()
                    process.join()
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()
        self._meetings.cleanup()


def worker_devices(config: RunConfig) -> list[tuple[str, tuple[int, ...]]]:
    """Device and CPU cores of each worker. Raises ``ValueError`` when there are too few."""
    return place_workers(config.workers, _gpu_count() if config.workers.device != "cpu" else 0)


def place_workers(workers: WorkersConfig, gpus: int) -> list[tuple[str, tuple[int, ...]]]:
    """The same for a machine with so many GPUs."""
    if workers.device == "cuda" and gpus == 0:
        raise ValueError("workers.device is 'cuda' but no CUDA device was found")
    if gpus:
        most = gpus * workers.per_gpu
        count = workers.count or most
        if count > most:
            raise ValueError(
                f"workers.count is {count} but there are {gpus} CUDA devices with "
                f"workers.per_gpu={workers.per_gpu}: lower the one or raise the other"
            )
        return [(f"cuda:{rank // workers.per_gpu}", ()) for rank in range(count)]
    if workers.per_gpu > 1:
        raise ValueError(
            f"workers.per_gpu is {workers.per_gpu} but the run is on the CPU: use workers.count"
        )
    # Without affinity, as on macOS, workers share all cores.
    pins = hasattr(os, "sched_getaffinity")
    cores = sorted(os.sched_getaffinity(0)) if pins else range(os.cpu_count() or 1)
    count = workers.count or max(1, min(2, len(cores) // workers.threads))
    if not pins or not workers.pin or count * workers.threads > len(cores):
        return [("cpu", ())] * count
    size = workers.threads
    return [("cpu", tuple(cores[rank * size : (rank + 1) * size])) for rank in range(count)]


def _gpu_count() -> int:
    if not Path("/dev/nvidiactl").exists():
        return 0
    import torch

    return torch.cuda.device_count()
