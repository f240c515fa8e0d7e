"""Emulated engines and replicas: they are told what real ones are told, and report the same.

An engine of several devices, and a replica, is emulated once in a process; the other workers that
are a part of it only say what it says.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from rollpacker.core.types import AttemptId
from rollpacker.emulate.agenda import WallAgenda
from rollpacker.emulate.config import Emulated
from rollpacker.emulate.messages import Forced
from rollpacker.emulate.worker.responses import Coming, EmulatedResponses
from rollpacker.engine.base import EngineInfo
from rollpacker.policy.engines.device_split import turns
from rollpacker.runtime.messages import messages as msg
from rollpacker.runtime.messages.faults import Fault
from rollpacker.runtime.messages.shared_weights import SharedWeights
from rollpacker.runtime.worker.worker import Commands, EnginePart, ReplicaPart, Send
from rollpacker.sim.costs.ahead import Rule
from rollpacker.sim.world.machines import SLEEP_S, bare_curve
from rollpacker.sim.world.worker import GradientWork, SimWorker, StepWork
from rollpacker.train.base import Partial, Update

_MAX_RUNNING = 1024
"""Sequences that an engine without a setting for it decodes together."""

NO_WEIGHTS = SharedWeights(Path(), 0)
"""There are none, and nobody looks."""


class EmulatedProcess(Protocol):
    """The process that an emulated worker is in."""

    agenda: WallAgenda
    emulated: Emulated
    responses: EmulatedResponses

    def touch(self, worker: SimWorker) -> None:
        """It has changed: it plans anew when this instant is over."""
        ...

    def overlapping(self, engine: EmulatedEngine) -> Sequence[EmulatedEngine]:
        """Other engines on the same devices."""
        ...


class EmulatedEngine:
    """An engine: decodes responses of forced lengths.

    Args:
        place: its process.
        part: which engine it is.
        size: devices of the smallest engines.
        send: takes its reports.
    """

    def __init__(self, place: EmulatedProcess, part: EnginePart, size: int, send: Send) -> None:
        self._place = place
        self._send = send
        self._size = part.span.size
        self.covers = range(part.engine, part.engine + self._size // size)
        """The smallest engines on its devices."""
        self._costs = place.emulated.calibration.engine(self._size)
        self._held: dict[AttemptId, Coming] = {}
        self._version = -1
        self._resting = self.asleep = part.resting
        self._then: list[Callable[[], None]] = []
        self._turns = turns(place.emulated.run, gpus=False) != "off"
        self.trained: Callable[[int, GradientWork], None] = lambda _id, _task: None
        self.worker = SimWorker(
            0,
            place.agenda,
            self._costs,
            devices=self._size,
            max_running=getattr(place.emulated.run.engine, "max_running", _MAX_RUNNING),
            on_ended=self._ended,
            on_accumulated=lambda id_, task: self.trained(id_, task),
        )
        if self.asleep:
            self.worker.form()
        self.commands: Commands = {
            msg.BeginStep: self._begin_step,
            msg.LoadWeights: self._load_weights,
            msg.Sleep: self._sleep,
            Forced: self._submit,
            msg.Abort: self._abort,
            msg.DecodeAhead: self._speculate,
            msg.Proceed: lambda _command: None,
        }

    def info(self) -> EngineInfo:
        """What the calibration says of it."""
        tokens = math.floor(self._costs.capacity)
        return EngineInfo(
            kv_tokens=tokens,
            max_length=math.floor(tokens - self._costs.slack),
            tensor_parallel=(self._size,),
            latency=bare_curve(self._costs),
            prefill_token_s=self._costs.prefill_s(1.0),
            exact_seeds=True,
            context_token_s=self._costs.slope,
            speculates=self._place.emulated.ahead.possible,
        )

    def _speculate(self, command: msg.DecodeAhead) -> None:
        how, ahead = command.how, self._place.emulated.ahead
        self.worker.speculate(Rule(how.below, how.most, how.free, how.row_cost, ahead))
        self._place.touch(self.worker)

    def _begin_step(self, _command: msg.BeginStep) -> None:
        self.worker.begin_step(self._costs, self._size)

    def _load_weights(self, command: msg.LoadWeights) -> None:
        """New ones take their time; those that the devices had before they were put together do
        not, as in a simulation, but wait until what was there sleeps."""
        known = self._resting or command.version == self._version
        self._version = command.version
        if not known:
            wake_s = SLEEP_S if self.asleep and self._turns else 0.0
            self._place.agenda.after(self._place.emulated.publish_s + wake_s, self._loaded)
            return
        others = self._place.overlapping(self)
        awake = next((other for other in others if not other.asleep), None)
        if awake is None:
            self._loaded()
        else:
            awake.when_asleep(lambda: self._load_weights(command))

    def when_asleep(self, act: Callable[[], None]) -> None:
        """Call this when it may sleep."""
        self._then.append(act)

    def _loaded(self) -> None:
        self.asleep = False
        work = _work(self.worker.end_step())
        self._place.touch(self.worker)
        self._send(msg.WeightsLoaded(version=self._version, work=work, size=self._size))

    def _sleep(self, _command: msg.Sleep) -> None:
        """When what it was told to stop has stopped."""
        if self._held:
            self._then.insert(0, lambda: self._sleep(_command))
            return
        self.asleep = True
        work = _work(self.worker.end_step())
        slept = msg.Slept(work=work, size=self._size)
        if self._turns:
            self._place.agenda.after(SLEEP_S, lambda: self._send(slept))
        else:
            self.worker.form()
            self._send(slept)
        self._react()

    def _react(self) -> None:
        then, self._then = self._then, []
        for act in then:
            act()

    def _submit(self, command: Forced) -> None:
        for request, draw in zip(command.requests, command.draws, strict=True):
            coming = self._place.responses.coming(self._version, request, draw)
            course = coming.course
            needed = course.prompt_tokens + course.tokens + self._costs.slack
            if needed > self._costs.capacity:
                error = f"it needs {needed:.0f} tokens of KV cache of {self._costs.capacity:.0f}"
                self._send(msg.Failed(attempts=[request.attempt], error=error))
                continue
            self._held[request.attempt] = coming
            self.worker.submit(course)
        self._place.touch(self.worker)

    def _abort(self, command: msg.Abort) -> None:
        """At the end of the decode step; what has ended was reported before."""
        self.worker.stop([attempt for attempt in command.attempts if attempt in self._held])
        self._place.touch(self.worker)

    def _ended(self, _id: int, done: Sequence[AttemptId], stopped: Mapping[AttemptId, int]) -> None:
        responses, version = self._place.responses, self._version
        ended = [self._held.pop(attempt) for attempt in done]
        if ended:
            outputs = [responses.output(each, each.course.tokens, version) for each in ended]
            # Of all that was decoded since some last finished.
            outputs[0] = replace(outputs[0], drafts=self.worker.drafts())
            self._send(msg.Finished(outputs=outputs))
        if stopped:
            left = [(self._held.pop(attempt), tokens) for attempt, tokens in stopped.items()]
            outputs = [responses.output(each, n, version, aborted=True) for each, n in left]
            self._send(msg.Aborted(outputs=outputs))
        self._place.touch(self.worker)
        if not self._held:
            self._react()


class EmulatedReplica:
    """A training replica, or the workers of it that are in one process: sums nothing, on time.

    Args:
        place: its process.
        part: which replica it is.
        send: takes its reports, one for each of its workers.
        beside: the engine that shares its process, and decodes first.
    """

    def __init__(
        self, place: EmulatedProcess, part: ReplicaPart, send: Send, beside: EmulatedEngine | None
    ) -> None:
        emulated = place.emulated
        self._place = place
        self._part = part
        self._send = send
        self._costs = emulated.calibration.training(part.span.size)
        self._train_all = emulated.run.train.beta > 0
        self._coming: deque[tuple[msg.Accumulate, Partial]] = deque()
        if beside is None:
            self.worker = SimWorker(
                0,
                place.agenda,
                emulated.calibration.engine(),
                devices=part.span.size,
                max_running=1,
                on_ended=lambda _id, _done, _stopped: None,
                on_accumulated=self._accumulated,
            )
        else:
            self.worker, beside.trained = beside.worker, self._accumulated
        self.commands: Commands = {
            msg.Accumulate: self._accumulate,
            msg.Score: self._score,
            msg.Apply: self._apply,
            msg.Share: self._share,
            msg.Reform: lambda _command: None,
            msg.Save: self._refuse,
            msg.Load: self._refuse,
        }

    def _accumulate(self, command: msg.Accumulate) -> None:
        seconds, tokens, samples = self._costs.task_s, 0, 0
        for group in command.groups:
            lengths = [len(sample.tokens) for sample in group.samples]
            tokens, samples = tokens + sum(lengths), samples + len(lengths)
            if self._train_all or np.any(group.advantages):
                seconds += sum(map(self._costs.sequence_s, lengths))
        partial = Partial(normaliser=float(tokens), tokens=tokens, samples=samples, sums={})
        self._coming.append((command, partial))
        self.worker.accumulate(GradientWork(self._part.replica, command.parts, seconds))
        self._place.touch(self.worker)

    def _accumulated(self, _id: int, task: GradientWork) -> None:
        command, partial = self._coming.popleft()
        start_s, end_s = self._times(task.seconds)
        report = msg.Accumulated(parts=command.parts, partial=partial, start_s=start_s, end_s=end_s)
        self._send(report)
        self._place.touch(self.worker)

    def _times(self, seconds: float) -> tuple[float, float]:
        """Times of the clock, when what ends now began and ended."""
        agenda = self._place.agenda
        return agenda.clock_s(agenda.now - seconds), agenda.clock_s(agenda.now)

    def _score(self, command: msg.Score) -> None:
        """As in a simulation, log-probabilities cost nothing."""
        start_s, end_s = self._times(0.0)
        logprobs = {
            (sample.prompt, sample.index): sample.logprobs
            for group in command.groups
            for sample in group.samples
        }
        self._send(msg.ScoredSamples(logprobs=logprobs, start_s=start_s, end_s=end_s))

    def _apply(self, _command: msg.Apply) -> None:
        self._place.agenda.after(self._place.emulated.calibration.apply_s, self._applied)

    def _applied(self) -> None:
        start_s, end_s = self._times(self._place.emulated.calibration.apply_s)
        update = Update(applied=True, grad_norm=math.nan, learning_rate=math.nan, metrics={})
        self._send(msg.Applied(update=update, checksum=0, start_s=start_s, end_s=end_s))

    def _share(self, _command: msg.Share) -> None:
        """At once: bringing them to the engines takes its time there."""
        start_s, end_s = self._times(0.0)
        self._send(msg.Shared(weights=NO_WEIGHTS, start_s=start_s, end_s=end_s))

    def _refuse(self, _command: Any) -> None:
        text = "emulated devices (devices.emulate) have no weights: there is nothing to keep"
        self._send(msg.Done(fault=Fault(kind="user", text=text)))


def _work(done: StepWork) -> msg.Work:
    return msg.Work(
        decode_steps=done.decode_steps,
        generated_tokens=done.generated_tokens,
        prefill_tokens=0,
        preemptions=done.preemptions,
        cpu_s=0.0,
        decode_cpu_s=0.0,
    )
