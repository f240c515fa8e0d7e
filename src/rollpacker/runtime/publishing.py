"""New weights from the replicas to the engines, between steps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rollpacker.core.types import EngineId, ReplicaId
from rollpacker.runtime import messages as msg
from rollpacker.runtime.faults import WorkerError
from rollpacker.runtime.protocols import Listener, Loss, Workers


class Publishing:
    """One publication: engines of several devices are disbanded, a replica shares its weights
    where engines have processes of their own, and the engines load them.

    Args:
        workers: whose replicas have the weights and whose engines take them.
        version: of the weights: the step that they will sample.
        done: called when all engines have them.
    """

    def __init__(self, workers: Workers, version: int, done: Callable[[], None]) -> None:
        self.version = version
        self._workers = workers
        self._done = done
        self._sharing: ReplicaId | None = None
        self._missing: set[EngineId] | None = None
        self._formed = dict(workers.disband())
        if not self._formed:
            self._share()

    def _share(self) -> None:
        """No engine reads what was shared last."""
        if self._workers.apart:
            self._sharing = self._workers.share()
        else:
            self._load(None)

    def _load(self, shared: msg.Shared | None) -> None:
        self._sharing = None
        self._missing = set(self._workers.engines)
        self._workers.load_weights(self.version, None if shared is None else shared.weights)

    def slept(self, engine: EngineId, size: int) -> None:
        """An engine of ``size`` devices sleeps: one that was formed is none any more."""
        if self._formed.get(engine) == size:
            self._gone(engine)

    def _gone(self, engine: EngineId) -> None:
        if self._formed.pop(engine, None) is not None and not self._formed:
            self._share()

    def shared(self, report: msg.Shared) -> None:
        """The weights are where engines find them."""
        self._load(report)

    def loaded(self, engine: EngineId) -> None:
        """An engine has them."""
        if self._missing is not None and engine in self._missing:
            self._missing.discard(engine)
            if not self._missing:
                self._done()

    def lose(self, loss: Loss) -> None:
        """Engines will never have them, or another replica must share them."""
        for engine in loss.engines:
            self._gone(engine)
            self.loaded(engine)
        if self._sharing in loss.replicas:
            self._share()


async def publish(workers: Workers, version: int) -> None:
    """Bring the weights in place to the engines and wait, outside of a step.

    Raises ``WorkerError`` when a worker dies meanwhile.
    """
    published = asyncio.get_running_loop().create_future()

    def take(engine: EngineId, report: msg.EngineReport) -> None:
        if isinstance(report, msg.WeightsLoaded):
            publishing.loaded(engine)
        elif isinstance(report, msg.Slept):
            publishing.slept(engine, report.size)

    def hear(_replica: ReplicaId, report: msg.ReplicaReport) -> None:
        if isinstance(report, msg.Shared):
            publishing.shared(report)

    def lose(loss: Loss) -> None:
        if not published.done():
            published.set_exception(WorkerError(loss.text))

    with workers.listen(Listener(take, hear, lose)):
        publishing = Publishing(workers, version, lambda: published.set_result(None))
        await published
