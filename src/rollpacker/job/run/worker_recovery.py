"""What was lost in a run is started again beside its steps, and takes part when it is ready."""

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
    """Starts lost workers again, of nodes that are there or come back.

    Those that are back begin a step with everybody's weights and optimizer.

    Args:
        pool: whose workers they are.
        folder: the run's: what replicas are handed lies there meanwhile.
        tries: in a row, before the run goes on without them; 0 for none.
        wait: for the processes: the step in which they come back then depends on no time, and they
            find a device's memory free where engines and replicas take turns on it.
        note: tells the user.
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
        """Start those that are lost; whether some take part from now on, in step ``step``."""
        if not self._tries:
            return False
        if self._failed < self._tries:
            self._regain()
        lost = self._pool.lost()
        if self._starting is None and lost and self._failed < self._tries:
            self._starting = asyncio.create_task(self._pool.start_again(lost))
            # The run may end before anybody looks.
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
        """Those that are ready have what the others have, and take part."""
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
        more = "the run goes on without them" if self._failed >= self._tries else "once more"
        self._note(
            f"WARNING lost workers could not be started again ({self._failed} of "
            f"cluster.restarts={self._tries}): {error}; {more}"
        )

    async def _hand_over(self, replicas: Sequence[ReplicaId]) -> None:
        """Weights and optimizer of another one."""
        givers = [replica for replica in self._pool.replicas if replica not in replicas]
        if not replicas:
            return
        if not givers:
            raise WorkerError("no replica is left that has the weights")
        folder = self._folder
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed at this
        folder.mkdir()
        try:
            await self._pool.ask(msg.Save(folder=str(folder)), givers[:1])
            await self._pool.ask(msg.Load(folder=str(folder)), replicas)
        finally:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


def _named(engines: Sequence[EngineId], replicas: Sequence[ReplicaId]) -> str:
    return ", ".join([*(f"engine {n}" for n in engines), *(f"replica {n}" for n in replicas)])
