"""An engine that carries out the driver's messages."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rollpacker.config import MiniEngineConfig
from rollpacker.engine.base import check_room
from rollpacker.engine.compiling import told_of_compiling
from rollpacker.engine.configured import build_engine
from rollpacker.engine.latency import StepTimes
from rollpacker.engine.relay import Lead, follow, join, meet
from rollpacker.runtime.messages import messages as msg
from rollpacker.runtime.worker.weight_relay import WeightRelay
from rollpacker.runtime.worker.worker import Commands, Role, Send, WorkerSpec, prepare, prepared

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from rollpacker.core.types import AttemptId
    from rollpacker.engine.base import Engine, EngineInfo, EngineStats, Output

NewWeights = Callable[[], "Iterable[tuple[str, Any]] | None"]
"""The newest weights by the checkpoint's names. None if the engine shares them."""


class EngineWorker:
    """Decodes while it has attempts.

    Args:
        weights: source of new weights for commands without any.
        resting: it has no KV cache until it gets weights.
        lockstep: wait for ``Proceed`` after each report of finished attempts.
    """

    at = "a decode step"

    def __init__(
        self,
        engine: Engine,
        send: Send,
        weights: NewWeights = lambda: None,
        *,
        size: int = 1,
        resting: bool = False,
        lockstep: bool = False,
    ) -> None:
        self._engine = engine
        self._send = send
        self._weights = weights
        self._size = size
        self._lockstep = lockstep
        self._held = False
        self._asleep = resting
        self._away = False
        self._newest: msg.LoadWeights | None = None
        self._carrier = WeightRelay()
        self._times = StepTimes()
        self._tokens = 0
        self._below = 0
        self._prompts: dict[AttemptId, int] = {}
        """Prompt tokens of the engine's sequences."""
        self._context = 0
        """Tokens of all its sequences."""
        self._last_s: float | None = None
        """The end of the last step, if the engine has had work since."""
        self.commands: Commands = {
            msg.BeginStep: self._begin,
            msg.LoadWeights: self._load_weights,
            msg.Sleep: self.sleep,
            msg.Offload: self._offload,
            msg.Onload: self._onload,
            msg.Submit: self._submit,
            msg.Abort: self._abort,
            msg.DecodeAhead: self._decode_ahead,
            msg.Proceed: self._proceed,
            msg.Carry: lambda command: send(self._carrier.receive(command)),
        }
        if resting:
            engine.sleep()
        self._begin_step()

    def close(self) -> None:
        self._carrier.close()
        self._engine.close()

    def busy(self) -> bool:
        return self._engine.busy() and not self._held

    def work(self) -> bool:
        """Run one decode step. Returns whether it produced a token or ended a sequence."""
        cpu, start = time.process_time(), time.perf_counter()
        outputs = self._engine.step()
        seconds = time.perf_counter() - start
        self._decode_cpu_s += time.process_time() - cpu
        stats = self._engine.stats()
        if stats.rows > self._rows:
            self._times.add(stats.rows - self._rows, seconds)
            self._rows = stats.rows
        self._add_step(stats, outputs, self._last_s or start)
        if outputs:
            self._held = self._lockstep
            self._send(msg.Finished(outputs=outputs))
        tokens, self._tokens = self._tokens, stats.generated_tokens + stats.prefill_tokens
        return bool(outputs) or tokens != self._tokens

    def _add_step(self, now: EngineStats, outputs: Sequence[Output], since: float) -> None:
        before, self._seen = self._seen, now
        if self._begun_s is not None:
            self._start_s, self._begun_s = since - self._begun_s, None
        generated = now.generated_tokens - before.generated_tokens
        batch = max(1, now.running + len(outputs))
        context = self._context * batch / max(batch, len(self._prompts))
        self._context += generated
        self._forget(outputs)
        end = time.perf_counter()
        tokens = max(1.0, generated / batch)
        prefilled = now.prefill_tokens - before.prefill_tokens
        step = msg.StepSums(
            tokens,
            tokens * batch,
            tokens * (context + generated / 2),
            prefilled,
            len(outputs),
            end - since,
        )
        key = batch <= self._below, prefilled > 0, (batch - 1).bit_length()
        self._step_times[key] = self._step_times.get(key, msg.StepSums()).plus(step)
        self._last_s = end if self._engine.busy() and not self._lockstep else None

    def _forget(self, outputs: Iterable[Output]) -> None:
        for each in outputs:
            self._context -= self._prompts.pop(each.attempt, 0) + len(each.tokens)

    def _decode_ahead(self, command: msg.DecodeAhead) -> None:
        self._engine.speculate(command.how)
        self._below = command.how.below

    def _begin(self, _command: msg.BeginStep) -> None:
        """Begin a step. The step before may have failed: then a held engine got no ``Proceed``, and
        ``HostedJob`` stopped its attempts without ``Abort``."""
        self._held = False
        if not self._engine.busy():
            self._prompts.clear()
            self._context, self._last_s = 0, None
        self._begin_step()
        self._begun_s = time.perf_counter()

    def _begin_step(self) -> None:
        self._before = self._seen = self._engine.stats()
        self._step_times: dict[msg.StepKind, msg.StepSums] = {}
        self._below = 0
        self._begun_s: float | None = None
        self._start_s = 0.0
        self._rows = self._before.rows
        self._cpu_before = time.process_time()
        self._decode_cpu_s = 0.0

    def _load_weights(self, command: msg.LoadWeights) -> None:
        self._newest = command
        if not self._away:
            self._wake(command)
        version, work = command.version, self._work()
        self._send(msg.WeightsLoaded(version=version, work=work, size=self._size))

    def _wake(self, command: msg.LoadWeights) -> None:
        if self._asleep:
            self._engine.wake()
            self._asleep = False
        weights = self._weights() if command.weights is None else command.weights
        self._engine.load_weights(weights, command.version)

    def sleep(self, _command: msg.Sleep | None = None) -> None:
        self._newest = None
        self._lie_down()
        self._send(msg.Slept(work=self._work(), size=self._size))

    def _lie_down(self) -> None:
        if not self._asleep:
            self._engine.sleep()
            self._asleep = True

    def _offload(self, _command: msg.Offload) -> None:
        self._away = True
        self._lie_down()
        self._send(msg.Done())

    def _onload(self, _command: msg.Onload) -> None:
        """Load the newest weights again, as the file of the former ones may be gone."""
        self._away = False
        if self._newest is not None:
            self._wake(self._newest)
        self._send(msg.Done())

    def _submit(self, command: msg.Submit) -> None:
        for request in command.requests:
            try:
                self._engine.submit([request])
                self._prompts[request.attempt] = len(request.prompt)
                self._context += len(request.prompt) + len(request.generated)
            except ValueError as error:
                self._send(msg.Failed(attempts=[request.attempt], error=str(error)))

    def _abort(self, command: msg.Abort) -> None:
        outputs = self._engine.abort(command.attempts)
        self._forget(outputs)
        if not self._engine.busy():  # the next step must not count the idle time
            self._last_s = None
        self._send(msg.Aborted(outputs=outputs))

    def _proceed(self, _command: msg.Proceed) -> None:
        self._held = False

    def _work(self) -> msg.Work:
        now, before = self._engine.stats(), self._before
        work = msg.Work(
            decode_steps=now.steps - before.steps,
            generated_tokens=now.generated_tokens - before.generated_tokens,
            prefill_tokens=now.prefill_tokens - before.prefill_tokens,
            cached_tokens=now.cached_tokens - before.cached_tokens,
            preemptions=now.preemptions - before.preemptions,
            cpu_s=time.process_time() - self._cpu_before,
            decode_cpu_s=self._decode_cpu_s,
            decode_s=self._times.latency(),
            step_times=self._step_times,
            start_s=self._start_s,
        )
        self._begin_step()
        return work


class FollowingWorker:
    """A rank of an engine without reports. It follows the engine's lead."""

    at = ""

    def __init__(self, engine: Engine, lead: Connection) -> None:
        self._engine = engine
        self._lead = lead
        self.commands: Commands = {}

    def busy(self) -> bool:
        """It waits for its lead, not for the driver."""
        return True

    def work(self) -> None:
        """Follow the lead. Raises ``EOFError`` when the lead is gone."""
        follow(self._engine, self._lead)
        raise EOFError

    def close(self) -> None:
        self._lead.close()
        self._engine.close()


def engine_worker(spec: WorkerSpec, send: Send) -> Role:
    """An engine, or a rank of one, in its own process."""
    config, part = spec.config, spec.engine
    assert part is not None
    engine = build_engine(config, *_model(spec), spec.device, part.span, note=_noted(send))
    if part.span.rank > 0:
        lead = join(part.span)
        send(msg.Ready())
        return FollowingWorker(engine, lead)
    if part.span.size > 1:
        engine = Lead(engine, meet(part.span))
    info = measured(engine, send, spec.max_length)
    worker = EngineWorker(
        engine,
        send,
        size=part.span.size,
        resting=part.resting,
        lockstep=config.deterministic,
    )
    send(msg.Ready(info=info))
    return worker


def _noted(send: Send) -> Callable[[str], None]:
    return lambda text: send(msg.Noted(text=text))


def measured(engine: Engine, send: Send, max_length: int) -> EngineInfo:
    """Measure the engine's properties. A line tells the user if that takes long. Raises
    ``ValueError`` if it has no room for a response of ``max_length`` tokens."""
    with told_of_compiling(_noted(send)):
        info = engine.info()
    check_room(info, max_length)
    return info


def _model(spec: WorkerSpec) -> tuple[Any, Any]:
    """The model, if the engine does not load it by itself, and the tokenizer."""
    from rollpacker.train.model.loading import load_tokenizer, source

    if isinstance(spec.config.engine, MiniEngineConfig):
        return prepared(spec)
    prepare(spec)
    return None, load_tokenizer(spec.config.model, source(spec.config.model.path)[0])
