"""Restarts lost workers during a run's steps. They take part again when they are ready."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from rollpacker.core.types import EngineId, ReplicaId
from rollpacker.runtime.messages import messages as msg
from rollpacker.runtime.messages.faults import WorkerError
from rollpacker.runtime.pool.pool import WorkerPool
from rollpacker.runtime.step.publishing import publish


class WorkerRecovery:
    """Restarts lost workers on nodes that are there or come back.

    Restarted workers begin a step with the current weights and optimizer.

    Args:
        folder: the run's. The state for restarted replicas lies there meanwhile.
        tries: failures in a row before the run goes on without the workers. 0 for no restarts.
        wait: whether to wait for the processes. Then the step of their return does not depend on
            time. If engines and replicas take turns on a device, they also find its memory free.
    """

    def __init__(
        self,
        pool: WorkerPool,
        folder: Path,
        *,
        tries: int,
        wait: bool,
        note: Callable[[str], None],
    ) -> None:
        self._pool = pool
        self._folder = folder.absolute() / ".handed-over"
        self._tries = tries
        self._wait = wait
        self._note = note
        self._failed = 0
        self._starting: asyncio.Task[None] | None = None

    async def between_steps(self, step: int) -> bool:
        """Restart lost workers. Return whether some of them take part from step ``step`` on."""
        if not self._tries:
            return False
        if self._failed < self._tries:
            self._regain()
        lost = self._pool.lost()
        if self._starting is None and lost and self._failed < self._tries:
            self._starting = asyncio.create_task(self._pool.start_again(lost))
            # The run may end before anyone reads the result.
            self._starting.add_done_callback(lambda it: it.cancelled() or it.exception())
        if self._starting is None:
            return False
        if self._wait:
            await asyncio.wait([self._starting])
        if not self._starting.done():
            return False
        starting, self._starting = self._starting, None
        try:
            starting.result()
            await self._take_in(step)
        except (WorkerError, ValueError, OSError) as error:
            self._fail(error)
            return False
        self._failed = 0
        return True

    def _regain(self) -> None:
        try:
            self._pool.regain()
        except (WorkerError, ValueError) as error:
            self._fail(error)

    async def _take_in(self, step: int) -> None:
        engines, replicas = self._pool.admit()
        try:
            await self._hand_over(replicas)
            for text in await publish(self._pool, step):
                self._note(f"WARNING {text}")
        except (WorkerError, ValueError, OSError):
            self._pool.give_up()
            raise
        self._note(f"{_named(engines, replicas)}: back from step {step} on")

    def _fail(self, error: Exception) -> None:
        self._failed += 1
        more = "so the run goes on without them" if self._failed >= self._tries else "trying again"
        self._note(
            f"WARNING lost workers could not be started again ({self._failed} of "
            f"cluster.restarts={self._tries}): {error}, {more}"
        )

    async def _hand_over(self, replicas: Sequence[ReplicaId]) -> None:
        givers = [replica for replica in self._pool.replicas if replica not in replicas]
        if not replicas:
            return
        if not givers:
            raise WorkerError("no replica is left that has the weights")
        folder = self._folder
        shutil.rmtree(folder, ignore_errors=True)  # left by a run that was killed here
        folder.mkdir()
        try:
            await self._pool.ask(msg.Save(folder=str(folder)), givers[:1])
            await self._pool.ask(msg.Load(folder=str(folder)), replicas)
        finally:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


def _named(engines: Sequence[EngineId], replicas: Sequence[ReplicaId]) -> str:
    return ", ".join([*(f"engine {n}" for n in engines), *(f"replica {n}" for n in replicas)])
