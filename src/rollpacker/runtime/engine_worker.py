"""An engine that is told what to decode by messages."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from rollpacker.runtime import messages as msg
from rollpacker.runtime.worker import Commands, Send

if TYPE_CHECKING:
    from rollpacker.engine.base import Engine

NewWeights = Callable[[], "Iterable[tuple[str, Any]] | None"]
"""The newest weights by the checkpoint's names; None where the engine shares them."""


class EngineWorker:
    """Decodes while it has attempts.

    Args:
        engine: decodes.
        send: takes reports.
        weights: where new ones come from.
        lockstep: wait after each report of finished attempts until told to proceed.
    """

    def __init__(
        self, engine: Engine, send: Send, weights: NewWeights, *, lockstep: bool = False
    ) -> None:
        self._engine = engine
        self._send = send
        self._weights = weights
        self._lockstep = lockstep
        self._held = False
        self.commands: Commands = {
            msg.BeginStep: self._begin_step,
            msg.LoadWeights: self._load_weights,
            msg.Submit: self._submit,
            msg.Abort: self._abort,
            msg.Proceed: self._proceed,
        }
        self._begin_step()

    @property
    def progress(self) -> int:
        """Decode steps so far."""
        return self._engine.stats().steps

    def busy(self) -> bool:
        """Whether there is something to decode, and leave to do so."""
        return self._engine.busy() and not self._held

    def work(self) -> None:
        """One decode step."""
        before = time.process_time()
        outputs = self._engine.step()
        self._decode_cpu_s += time.process_time() - before
        if outputs:
            self._held = self._lockstep
            self._send(msg.Finished(outputs=outputs))

    def _begin_step(self, _command: msg.BeginStep | None = None) -> None:
        self._before = self._engine.stats()
        self._cpu_before = time.process_time()
        self._decode_cpu_s = 0.0

    def _load_weights(self, command: msg.LoadWeights) -> None:
        self._engine.load_weights(self._weights(), command.version)
        self._send(msg.WeightsLoaded(version=command.version, work=self._work()))

    def _submit(self, command: msg.Submit) -> None:
        for request in command.requests:
            try:
                self._engine.submit([request])
            except ValueError as error:
                self._send(msg.Failed(attempts=[request.attempt], error=str(error)))

    def _abort(self, command: msg.Abort) -> None:
        self._send(msg.Aborted(outputs=self._engine.abort(command.attempts)))

    def _proceed(self, _command: msg.Proceed) -> None:
        self._held = False

    def _work(self) -> msg.Work:
        now, before = self._engine.stats(), self._before
        return msg.Work(
            decode_steps=now.steps - before.steps,
            generated_tokens=now.generated_tokens - before.generated_tokens,
            prefill_tokens=now.prefill_tokens - before.prefill_tokens,
            preemptions=now.preemptions - before.preemptions,
            cpu_s=time.process_time() - self._cpu_before,
            decode_cpu_s=self._decode_cpu_s,
        )
