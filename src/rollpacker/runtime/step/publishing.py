"""New weights from the replicas to the engines, between steps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from rollpacker.core.types import EngineId, ReplicaId
from rollpacker.runtime.messages import messages as msg
from rollpacker.runtime.messages.faults import WorkerError
from rollpacker.runtime.messages.shared_weights import SharedWeights
from rollpacker.runtime.pool.in_process import Workers
from rollpacker.runtime.pool.pool import Listener, Loss

_TRIES = 3
"""Tries to bring weights to other nodes, if no loss explains the failure."""


class Publishing:
    """One publication of weights. Formed engines are disbanded. A replica shares its weights with
    engines of other processes, and they are carried to other nodes. Then the engines load them."""

    def __init__(self, workers: Workers, version: int, done: Callable[[], None]) -> None:
        self.version = version
        self._workers = workers
        self._transport = workers.transport
        self._done = done
        self._sharing: ReplicaId | None = None
        self._places: dict[int, SharedWeights] | None = None
        self._sending = False
        self._receiving: set[EngineId] = set()
        self._problem = ""
        self._tries = 0
        self._missing: set[EngineId] | None = None
        self._formed = dict(workers.disband())
        if not self._formed:
            self._share()

    def _share(self) -> None:
        """Share anew. No engine reads the weights that were shared last."""
        if self._transport is None:
            self._load()
        else:
            self._sharing = self._transport.share()

    def _load(self) -> None:
        self._missing = set(self._workers.engines)
        self._workers.load_weights(self.version, self._places)

    def take_engine(self, engine: EngineId, report: msg.EngineReport) -> bool:
        """Take an engine's report. False if it does not belong to this publication."""
        match report:
            case msg.WeightsLoaded() if report.version == self.version:
                self.loaded(engine)
            case msg.Slept():
                self.slept(engine, report.size)
            case msg.Carried():
                self.carried(engine, report)
            case _:
                return False
        return True

    def take_replica(self, report: msg.ReplicaReport) -> bool:
        """Take a replica's report. False if it does not belong to this publication."""
        match report:
            case msg.Shared():
                self.shared(report)
            case msg.Carried():
                self.carried(None, report)
            case _:
                return False
        return True

    def slept(self, engine: EngineId, size: int) -> None:
        """An engine of ``size`` devices sleeps, so a formed one is disbanded."""
        if self._formed.get(engine) == size:
            self._gone(engine)

    def _gone(self, engine: EngineId) -> None:
        if self._formed.pop(engine, None) is not None and not self._formed:
            self._share()

    def shared(self, report: msg.Shared) -> None:
        assert self._transport is not None
        assert self._sharing is not None
        assert report.weights is not None
        self._places = {self._transport.home(self._sharing): report.weights}
        self._receiving = {*self._transport.carry(self._sharing, report.weights.size)}
        self._sending, self._problem = bool(self._receiving), ""
        self._carry_on()

    def carried(self, engine: EngineId | None, report: msg.Carried) -> None:
        """The weights have come to an engine's node, or (None) left the sharing node."""
        assert self._transport is not None
        self._problem = self._problem or report.problem
        if engine is None:
            self._sending = False
        else:
            self._receiving.discard(engine)
            if report.weights is not None and self._places is not None:
                self._places[self._transport.node(engine)] = report.weights
        self._carry_on()

    def _carry_on(self) -> None:
        """Go on when all have answered. Reports have no number, so a second request before could be
        matched with an answer to the first."""
        if self._sending or self._receiving:
            return
        assert self._transport is not None
        if not self._problem:
            self._sharing = None
            self._transport.leave(self._load)
            return
        self._transport.part()
        self._tries += 1
        if self._tries >= _TRIES:
            assert self._places is not None
            self._transport.abandon([*self._places], f"no weights came: {self._problem}")
        self._share()

    def loaded(self, engine: EngineId) -> None:
        if self._missing is not None and engine in self._missing:
            self._missing.discard(engine)
            if not self._missing:
                self._done()

    def lose(self, loss: Loss) -> None:
        """Give up lost engines, or let another replica share the weights."""
        for engine in loss.engines:
            self._gone(engine)
            self.loaded(engine)
        carrying = self._sending or bool(self._receiving)
        if carrying and (self._receiving & {*loss.engines} or self._sharing in loss.replicas):
            self._receiving -= {*loss.engines}
            self._sending = self._sending and self._sharing not in loss.replicas
            self._problem, self._tries = loss.text, 0
            self._carry_on()
        elif self._sharing in loss.replicas:
            self._share()


async def publish(workers: Workers, version: int) -> list[str]:
    """Bring the current weights to the engines, outside of a step. Returns losses as texts. Raises
    ``WorkerError`` if no engine or no replica is left."""
    lost: list[str] = []
    published = asyncio.get_running_loop().create_future()

    def fail(error: Exception) -> None:
        if not published.done():
            published.set_exception(error)

    def guarded(react: Callable[..., object]) -> Callable[..., None]:
        """Turn an error into the result, or the wait would never end."""

        def call(*args: Any) -> None:
            try:
                react(*args)
            except Exception as error:
                fail(error)

        return call

    def lose(loss: Loss) -> None:
        lost.append(loss.text)
        if workers.engines and workers.replicas:
            publishing.lose(loss)
        else:
            fail(WorkerError(loss.text))

    listener = Listener(
        guarded(lambda engine, report: publishing.take_engine(engine, report)),
        guarded(lambda _replica, report: publishing.take_replica(report)),
        guarded(lose),
    )
    with workers.listen(listener):
        publishing = Publishing(workers, version, lambda: published.set_result(None))
        await published
    return lost
