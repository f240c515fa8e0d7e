"""An engine in the driver's own process, beside a host's trainer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from rollpacker.core.types import EngineId, ReplicaId
from rollpacker.engine.base import Engine
from rollpacker.policy.engines.fleet import Fleet, by_number
from rollpacker.runtime.messages import messages as msg
from rollpacker.runtime.messages.faults import spawn
from rollpacker.runtime.messages.shared_weights import SharedWeights
from rollpacker.runtime.pool.pool import Listener, Loss, WorkerPool
from rollpacker.runtime.worker.engine_worker import EngineWorker, NewWeights
from rollpacker.train.base import Partial, Update

_ENGINE, _HOST = EngineId(0), ReplicaId(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostUpdate:
    """The host's update with a round. Times are of the monotonic clock."""

    update: Update
    start_s: float
    end_s: float


class InProcess:
    """One engine, and the host's trainer in place of the replica (``Workers``).

    The engine decodes between callbacks of the event loop. Commands to the replica are answered
    after the host has ``trained``.

    Args:
        weights: the host's, by the checkpoint's names. None if the engine reads them in place.
        lockstep: the engine waits for ``Proceed`` after each report of finished responses.
    """

    transport = None
    on_gpus = False

    def __init__(self, engine: Engine, weights: NewWeights, *, lockstep: bool) -> None:
        self.info = engine.info()
        self._loop = asyncio.get_running_loop()
        self._worker = EngineWorker(engine, self._from_engine, weights, lockstep=lockstep)
        self._decoding: asyncio.Task[None] | None = None
        self._listener: Listener | None = None
        self._waiting: list[msg.ReplicaCommand] = []
        self._trained: HostUpdate | None = None
        self.engines, self.replicas = (_ENGINE,), (_HOST,)

    @property
    def fleet(self) -> Fleet:
        return by_number("colocated", self.engines, self.replicas)

    @contextmanager
    def listen(self, listener: Listener) -> Iterator[None]:
        before, self._listener = self._listener, listener
        try:
            yield
        finally:
            self._listener = before

    # The engine -------------------------------------------------------------------------------

    def to_engine(self, engine: EngineId, command: msg.EngineCommand) -> None:
        """Carry out a command. Its report comes later, as from another process."""
        assert engine == _ENGINE
        self._worker.commands[type(command)](command)
        if self._decoding is None and self._worker.busy():
            self._decoding = spawn(self._decode())

    def load_weights(self, version: int, weights: Mapping[int, SharedWeights] | None) -> None:
        assert weights is None
        self.to_engine(_ENGINE, msg.LoadWeights(version=version))

    async def _decode(self) -> None:
        try:
            while self._worker.busy():
                self._worker.work()
                await asyncio.sleep(0)
        except Exception as error:
            self.engines = ()
            text = f"the engine failed: {type(error).__name__}: {error}"
            loss = Loss(engines=(_ENGINE,), replicas=(), text=text)
            self._tell(lambda to: to.lost(loss))
        finally:
            self._decoding = None

    def _from_engine(self, report: Any) -> None:
        self._loop.call_soon(self._tell, lambda to: to.engine(_ENGINE, report))

    def _tell(self, say: Callable[[Listener], None]) -> None:
        if self._listener is not None:
            say(self._listener)

    # The host ---------------------------------------------------------------------------------

    def to_replica(self, replica: ReplicaId, command: msg.ReplicaCommand) -> None:
        """Keep the command: the host trains when it gets the round."""
        assert replica == _HOST
        self._waiting.append(command)
        self._answer()

    def begin(self) -> None:
        self._trained = None
        self._waiting.clear()

    def trained(self, update: HostUpdate) -> None:
        self._trained = update
        self._answer()

    def _answer(self) -> None:
        while self._trained is not None and self._waiting:
            report = _report(self._waiting.pop(0), self._trained)
            self._loop.call_soon(self._tell, lambda to, r=report: to.replica(_HOST, r))
            # The first report has the time of all gradients.
            self._trained = replace(self._trained, start_s=self._trained.end_s)

    # What only several processes need ---------------------------------------------------------

    def disband(self) -> Mapping[EngineId, int]:
        return {}

    def meet(self) -> None:
        """There is one replica."""

    def unheard(self) -> list[str]:
        return []

    def form(self, engine: EngineId, members: Sequence[EngineId]) -> None:
        raise AssertionError(f"one device cannot be {engine} of {members}")


def _report(command: msg.ReplicaCommand, done: HostUpdate) -> msg.ReplicaReport:
    match command:
        case msg.Accumulate():
            tokens = sum(len(s.tokens) for group in command.groups for s in group.samples)
            return msg.Accumulated(
                parts=command.parts,
                partial=Partial(normaliser=1.0, tokens=tokens, sums={}),
                start_s=done.start_s,
                end_s=done.end_s,
            )
        case msg.Apply():
            return msg.Applied(update=done.update, checksum=0, start_s=done.end_s, end_s=done.end_s)
        case _:
            raise AssertionError(f"the host's trainer got {command}")


Workers = WorkerPool | InProcess
"""The engines and replicas of one run. Commands to a lost one have no effect."""
