"""New weights from the replicas to the engines, between steps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rollpacker.core.types import EngineId
from rollpacker.runtime import messages as msg
from rollpacker.runtime.faults import WorkerError
from rollpacker.runtime.protocols import Listener, Loss, Workers


class Publishing:
    """One publication.

    Args:
        workers: whose replicas have the weights and whose engines take them.
        version: of the weights: the step that they will sample.
        done: called with every engine's work since its last step began.
    """

    def __init__(
        self, workers: Workers, version: int, done: Callable[[dict[EngineId, msg.Work]], None]
    ) -> None:
        self._done = done
        self._work: dict[EngineId, msg.Work] = {}
        self._missing = set(workers.engines)
        for engine in workers.engines:
            workers.to_engine(engine, msg.LoadWeights(version=version))

    def loaded(self, engine: EngineId, report: msg.WeightsLoaded) -> None:
        """An engine has them."""
        self._work[engine] = report.work
        self._without(engine)

    def lose(self, engine: EngineId) -> None:
        """An engine will never have them."""
        if engine in self._missing:
            self._without(engine)

    def _without(self, engine: EngineId) -> None:
        self._missing.discard(engine)
        if not self._missing:
            self._done(self._work)


async def publish(workers: Workers, version: int) -> None:
    """Bring the weights in place to the engines and wait, outside of a step.

    Raises ``WorkerError`` when a worker dies meanwhile.
    """
    published = asyncio.get_running_loop().create_future()

    def take(engine: EngineId, report: msg.EngineReport) -> None:
        if isinstance(report, msg.WeightsLoaded):
            publishing.loaded(engine, report)

    def lose(loss: Loss) -> None:
        if not published.done():
            published.set_exception(WorkerError(loss.text))

    with workers.listen(Listener(take, lambda _replica, _report: None, lose)):
        publishing = Publishing(workers, version, published.set_result)
        await published
