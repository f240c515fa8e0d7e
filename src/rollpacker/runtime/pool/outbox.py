"""What engines are to be told, gathered until all is decided: for each one message a kind."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable

from rollpacker.core import decisions as do
from rollpacker.core.types import AttemptId, EngineId
from rollpacker.engine.base import Request, Speculation
from rollpacker.runtime.attempts.attempts import Trajectory
from rollpacker.runtime.messages import messages as msg
from rollpacker.runtime.pool.protocols import Engines

_AT_ONCE = 1024
"""Requests sent before reports are heard."""


class EngineOutbox:
    """Messages for the engines.

    Args:
        workers: the engines.
        request: makes an attempt's request when it is sent.
        lockstep: engines that have reported wait for ``proceed``.
    """

    def __init__(
        self, workers: Engines, request: Callable[[Trajectory], Request], *, lockstep: bool
    ) -> None:
        self._workers = workers
        self._request = request
        self._lockstep = lockstep
        self._held: set[EngineId] = set()
        self._waits = False
        self._attempts: dict[EngineId, dict[AttemptId, Trajectory]] = defaultdict(dict)
        self._stopping: dict[EngineId, list[AttemptId]] = defaultdict(list)
        self._forming: list[do.FormEngine] = []
        self._speculating: list[do.Speculate] = []
        self._tired: list[EngineId] = []

    def begin(self) -> None:
        """A step begins."""
        self._attempts.clear()
        self._waits = False
        self._forming.clear()
        self._speculating.clear()
        self._tired.clear()
        for engine in self._workers.engines:
            self._workers.to_engine(engine, msg.BeginStep())

    def add(self, attempt: Trajectory) -> None:
        """An attempt is to decode on its engine."""
        self._attempts[attempt.engine][attempt.id] = attempt

    def drop(self, attempt: Trajectory) -> bool:
        """It is not; whether it was not sent yet."""
        waiting = self._attempts.get(attempt.engine, {})
        return waiting.pop(attempt.id, None) is not None

    def stop(self, engine: EngineId, attempt: AttemptId) -> None:
        """An engine is to forget an attempt."""
        self._stopping[engine].append(attempt)

    def form(self, decision: do.FormEngine) -> None:
        """Put devices together when what they decode is told to stop."""
        self._forming.append(decision)

    def speculate(self, decision: do.Speculate) -> None:
        """When its devices are put together, before its first attempts."""
        self._speculating.append(decision)

    def sleep(self, decision: do.SleepEngine) -> None:
        """When what an engine decodes was told to stop."""
        self._tired.append(decision.engine)

    def wait(self) -> None:
        """In lockstep, send nothing until ``proceed``."""
        self._waits = self._lockstep

    def send(self) -> None:
        """Send what was gathered, one message for each engine.

        Of very many requests the first now, and the others when reports have had their turn.
        """
        if self._waits:
            return
        if self._forming:
            self._stop()
            for decision in self._forming:
                self._workers.form(decision.engine, decision.members)
            self._forming.clear()
        for decision in self._speculating:
            how = Speculation(
                below=decision.below,
                most=decision.most,
                free=decision.free,
                row_cost=decision.row_cost,
            )
            self._workers.to_engine(decision.engine, msg.DecodeAhead(how=how))
        self._speculating.clear()
        sent = 0
        while self._attempts and (self._lockstep or sent < _AT_ONCE):
            sent += self._submit(next(iter(self._attempts)))
        self._stop()
        for engine in self._tired:
            self._workers.to_engine(engine, msg.Sleep())
        self._tired.clear()
        if self._attempts:
            asyncio.get_running_loop().call_soon(self.send)

    def _stop(self) -> None:
        for engine, attempts in self._stopping.items():
            self._submit(engine)
            self._workers.to_engine(engine, msg.Abort(attempts=attempts))
        self._stopping.clear()

    def _submit(self, engine: EngineId) -> int:
        """Send an engine its requests; returns how many."""
        attempts = self._attempts.pop(engine, {})
        if attempts:
            requests = [self._request(attempt) for attempt in attempts.values()]
            self._workers.to_engine(engine, msg.Submit(requests=requests))
        return len(attempts)

    def hold(self, engine: EngineId) -> None:
        """In lockstep: it has reported, and waits."""
        if self._lockstep:
            self._held.add(engine)

    def proceed(self) -> None:
        """In lockstep: what finished has been dealt with, decode on."""
        if self._waits:
            self._waits = False
            self.send()
        for engine in sorted(self._held):
            self._workers.to_engine(engine, msg.Proceed())
        self._held.clear()
