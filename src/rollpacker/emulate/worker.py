"""Emulated workers, many in a process. They take the commands of real ones, and report the same."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import pickle
import selectors
import signal
import socket
import time
import traceback
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, NamedTuple

import numpy as np

from rollpacker.core.types import AttemptId, FinishReason, PromptId, sampling_seed
from rollpacker.emulate.config import Emulated
from rollpacker.emulate.messages import Draw, Forced, Punctual, WallAgenda
from rollpacker.emulate.reward import head_of
from rollpacker.engine.base import EngineInfo, Output, Request
from rollpacker.policy.engines.device_split import turns
from rollpacker.processes.children import shielded
from rollpacker.runtime.ipc.link import Wire
from rollpacker.runtime.messages import messages as msg
from rollpacker.runtime.messages.faults import Fault
from rollpacker.runtime.messages.shared_weights import SharedWeights
from rollpacker.runtime.worker.worker import Commands, EnginePart, ReplicaPart, Send, WorkerSpec
from rollpacker.sim.costs.costs import Rule
from rollpacker.sim.workload.workload import TurnScript, at_most
from rollpacker.sim.world.machines import SLEEP_S, bare_curve
from rollpacker.sim.world.worker import GradientWork, SimWorker, StepWork
from rollpacker.train.base import Partial, Update

_CORPUS = 1 << 20
_MOST_SAMPLES = 1 << 14
_MAX_RUNNING = 1024
"""Sequences in a batch, if the engine has no setting for it."""
_SHORT = 1 << 12
"""Bytes of the longest message that may be ``Stop``, for a worker that carries out nothing else."""
_UNREAD = msg.Proceed()
_ROUNDS = 8
"""Parts of a heartbeat. In each part some of the workers give their sign of life."""
NO_WEIGHTS = SharedWeights(Path(), 0)
"""A stand-in for weights that nothing reads."""


class Coming(NamedTuple):
    """A response that is being decoded: its request and its planned end."""

    request: Request
    course: TurnScript
    reward: float
    grading_s: float


class EmulatedResponses:
    """Answers of one process's engines: random tokens of forced lengths, with a grader's head."""

    def __init__(self, emulated: Emulated, cap: int, vocabulary: int) -> None:
        self._emulated = emulated
        self._cap = cap
        self._seed = emulated.run.seed
        self._step = -1
        self._workload = emulated.workload({"default": 1.0})
        self._draws: dict[PromptId, Draw] = {}
        self._indices: dict[PromptId, dict[int, int]] = {}
        rng = np.random.default_rng([self._seed, 6])
        self._tokens = rng.integers(0, vocabulary, _CORPUS + cap, dtype=np.int32)
        self._logprobs = -rng.standard_exponential(_CORPUS + cap, dtype=np.float32)

    def coming(self, step: int, request: Request, draw: Draw) -> Coming:
        if step != self._step:
            self._step, self._workload = step, self._emulated.workload({"default": 1.0})
            self._draws.clear()
            self._indices.clear()
        prompt, workload = request.group, self._workload
        if self._draws.get(prompt) != draw:
            self._draws[prompt] = draw
            workload.place(prompt, draw.domain, number=draw.number, visits=draw.visits)
        index = self._index(step, prompt, request.seed)
        turns = at_most(workload.turns(step, prompt, index), self._cap)
        course = TurnScript(request.attempt, prompt, workload.prompt_tokens, turns)
        course.generated = len(request.generated)
        reward = workload.reward(step, prompt, index)
        return Coming(request, course, reward, self._grading_s(step, prompt, index))

    def _index(self, step: int, prompt: PromptId, seed: int) -> int:
        known = self._indices.setdefault(prompt, {})
        while seed not in known:
            index = len(known)
            assert index < _MOST_SAMPLES, "the seed belongs to another run"
            known[sampling_seed(self._seed, step, prompt, index)] = index
        return known[seed]

    def _grading_s(self, step: int, prompt: PromptId, index: int) -> float:
        emulated = self._emulated
        costs, run = emulated.calibration.rewards, emulated.run
        if not emulated.asynchronous:
            # All are graded together, and each process grades its share one after the other.
            count = run.rollout.prompts_per_step * run.rollout.num_generations
            seconds = emulated.calibration.synchronous_reward_s * run.grading.workers / count
            return seconds / emulated.config.factor
        match emulated.kind(self._draws[prompt].domain):
            case "none":
                seconds = 0.0
            case "math":
                seconds = costs.math_s
            case "judge":
                seconds = costs.judged_s(0.0)
            case "code":
                longest = run.grading.code_timeout.most_s
                seconds = min(longest, self._workload.run_s(step, prompt, index))
        return seconds / emulated.config.factor

    def output(self, coming: Coming, tokens: int, version: int, *, aborted: bool = False) -> Output:
        at = coming.request.seed % _CORPUS
        ids = self._tokens[at : at + tokens].copy()
        head = head_of(coming.reward, coming.grading_s)[:tokens]
        ids[: len(head)] = head
        ended: FinishReason = "length" if tokens >= self._cap else "stop"
        return Output(
            attempt=coming.request.attempt,
            tokens=ids,
            logprobs=self._logprobs[at : at + tokens],
            finish_reason="abort" if aborted else ended,
            weights_version=version,
        )


class EmulatedEngine:
    """An engine that decodes responses of forced lengths. The smallest span ``size`` devices."""

    def __init__(self, place: Process, part: EnginePart, size: int, send: Send) -> None:
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
        """New weights take their time. Weights that the devices had before they joined take none,
        as in a simulation, but wait until the former engines sleep."""
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
        self._then.append(act)

    def _loaded(self) -> None:
        self.asleep = False
        work = _work(self.worker.end_step())
        self._place.touch(self.worker)
        self._send(msg.WeightsLoaded(version=self._version, work=work, size=self._size))

    def _sleep(self, _command: msg.Sleep) -> None:
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
        """Stop at the end of the decode step. Ended attempts were reported before."""
        self.worker.stop([attempt for attempt in command.attempts if attempt in self._held])
        self._place.touch(self.worker)

    def _ended(self, _id: int, done: Sequence[AttemptId], stopped: Mapping[AttemptId, int]) -> None:
        responses, version = self._place.responses, self._version
        ended = [self._held.pop(attempt) for attempt in done]
        if ended:
            outputs = [responses.output(each, each.course.tokens, version) for each in ended]
            # Drafts of all decoding since the last report of finished attempts.
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
    """A training replica, or its workers in one process. It sums nothing, but on time. ``beside``:
    the engine in the same process, which decodes first."""

    def __init__(
        self, place: Process, part: ReplicaPart, send: Send, beside: EmulatedEngine | None
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
        """Times of the clock at which work of ``seconds`` that ends now began and ended."""
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
        """Answer at once: the engines take the time of the transfer."""
        start_s, end_s = self._times(0.0)
        self._send(msg.Shared(weights=NO_WEIGHTS, start_s=start_s, end_s=end_s))

    def _refuse(self, _command: Any) -> None:
        text = "emulated devices (devices.emulate) have no weights to save or load"
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


def main(
    ends: Sequence[End], specs: Sequence[WorkerSpec], emulated: Emulated, vocabulary: int
) -> None:
    """Serve these workers until all drivers' ends are closed or ``Stop`` came."""
    with shielded():
        try:
            Process(ends, specs, emulated, vocabulary).serve()
        except ValueError as error:
            _die(ends, Fault(kind="user", text=str(error)))
        except Exception:
            _die(ends, Fault(kind="crash", text=traceback.format_exc()))


def _die(ends: Sequence[Wire], fault: Fault) -> None:
    for end in ends:
        with contextlib.suppress(OSError):
            end.send(msg.Died(fault=fault))


class End(Wire):
    """A worker's end of its channel."""

    def skim(self) -> Any:
        """Wait for the next message. A long one is not unpacked."""
        data = self.message()
        return pickle.loads(data) if len(data) <= _SHORT else _UNREAD


class CommandInbox:
    """Messages of all workers with their time of arrival. None stands for a closed end. It reads
    all the time, as two writers to full sockets would block each other. ``silent`` workers carry
    out no command, as another rank does."""

    def __init__(self, ends: Sequence[End], silent: Collection[int]) -> None:
        self._ends = ends
        self._silent = silent
        self._queue: SimpleQueue[tuple[float, int, msg.Command | None]] = SimpleQueue()
        Thread(target=self._read, name="inbox", daemon=True).start()

    def _read(self) -> None:
        with selectors.DefaultSelector() as selector:
            for worker, end in enumerate(self._ends):
                selector.register(end.fileno(), selectors.EVENT_READ, worker)
            while selector.get_map():
                for key, _ in selector.select():
                    command = self._receive(key.data)
                    if command is None or isinstance(command, msg.Stop):
                        selector.unregister(key.fd)
                    self._queue.put((time.monotonic(), key.data, command))

    def _receive(self, worker: int) -> msg.Command | None:
        try:
            end = self._ends[worker]
            return end.skim() if worker in self._silent else end.recv()
        except (EOFError, OSError):
            return None

    def get(self, timeout_s: float) -> tuple[float, int, msg.Command | None] | None:
        try:
            return self._queue.get(timeout=timeout_s) if timeout_s > 0 else self._queue.get_nowait()
        except Empty:
            return None


class Process:
    """Emulated workers, one channel each, on one agenda."""

    def __init__(
        self,
        ends: Sequence[End],
        specs: Sequence[WorkerSpec],
        emulated: Emulated,
        vocabulary: int,
    ) -> None:
        self.emulated = emulated
        self.agenda = WallAgenda(emulated.config.factor)
        self.responses = EmulatedResponses(emulated, specs[0].max_length, vocabulary)
        self._number = specs[0].rank
        self._ends: dict[int, Wire] = dict(enumerate(ends))
        self._touched: dict[int, SimWorker] = {}
        sizes = [spec.engine.span.size for spec in specs if spec.engine is not None]
        self._size = min(sizes, default=1)
        self._engines: list[EmulatedEngine] = []
        self._commands: list[dict[type, Callable[[Any], None]]] = [{} for _ in specs]
        self._build(specs)
        self._inbox = CommandInbox(ends, {w for w in self._ends if not self._commands[w]})
        self._beat_s = specs[0].config.cluster.heartbeat_s / _ROUNDS
        self._beats: deque[int] = deque(self._ends)
        self._next_beat = time.monotonic() + self._beat_s

    def _build(self, specs: Sequence[WorkerSpec]) -> None:
        members: dict[int, list[int]] = {}
        for worker, spec in enumerate(specs):
            engine = None
            if spec.engine is not None and spec.engine.span.rank == 0:
                engine = EmulatedEngine(
                    self, spec.engine, self._size, partial(self._send, [worker])
                )
                self._engines.append(engine)
                self._commands[worker] |= engine.commands
            if spec.replica is not None:
                part = members.setdefault(spec.replica.replica, [])
                part.append(worker)
                if len(part) == 1:
                    send = partial(self._send, part)
                    replica = EmulatedReplica(self, spec.replica, send, engine)
                    self._commands[worker] |= replica.commands
            self._send([worker], msg.Ready(info=None if engine is None else engine.info()))
        for worker, commands in enumerate(self._commands):
            if commands:
                commands[msg.Carry] = partial(self._carry, worker)

    def _carry(self, worker: int, _command: msg.Carry) -> None:
        now = self.agenda.clock_s(self.agenda.now)
        self._send([worker], msg.Carried(weights=NO_WEIGHTS, start_s=now, end_s=now))

    def _send(self, workers: Sequence[int], report: msg.Report) -> None:
        for worker in workers:
            end = self._ends.get(worker)
            if end is not None:
                if isinstance(report, msg.WeightsLoaded) and worker == next(iter(self._ends)):
                    self._beat(worker)
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    end.send(report)

    def _beat(self, worker: int) -> None:
        late = Punctual(process=self._number, lateness=self.agenda.lateness)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._ends[worker].send(late)

    def touch(self, worker: SimWorker) -> None:
        """Let the changed worker plan anew at the end of this instant."""
        if not self._touched:
            self.agenda.after(0.0, self._settle)
        self._touched[id(worker)] = worker

    def _settle(self) -> None:
        touched, self._touched = self._touched, {}
        for worker in touched.values():
            worker.settle()

    def overlapping(self, engine: EmulatedEngine) -> list[EmulatedEngine]:
        return [
            other
            for other in self._engines
            if other is not engine
            and other.covers.start < engine.covers.stop
            and engine.covers.start < other.covers.stop
        ]

    def serve(self) -> None:
        while self._ends:
            self._take(min(self.agenda.wait_s(), self._next_beat - time.monotonic()))
            self.agenda.run_due()
            if time.monotonic() >= self._next_beat:
                self._next_beat += self._beat_s
                for _ in range(-(-len(self._beats) // _ROUNDS)):
                    self._give_sign()

    def _give_sign(self) -> None:
        worker = self._beats.popleft()
        if worker in self._ends:
            self._beats.append(worker)
            self._beat(worker)

    def _take(self, timeout_s: float) -> None:
        arrived = self._inbox.get(timeout_s)
        while arrived is not None:
            at, worker, command = arrived
            if command is None or isinstance(command, msg.Stop):
                self._leave(worker)
            else:
                when = self.agenda.of(at)
                self.agenda.at(when, lambda w=worker, c=command: self._do(w, c))
            arrived = self._inbox.get(0.0)

    def _do(self, worker: int, command: msg.Command) -> None:
        act = self._commands[worker].get(type(command))
        if act is not None and worker in self._ends:
            act(command)

    def _leave(self, worker: int) -> None:
        end = self._ends.pop(worker, None)
        if end is not None:
            end.close()


class EmulatedWorker:
    """One of the workers in a process. The process ends with the last of them."""

    def __init__(self, process: BaseProcess, living: set[int], number: int) -> None:
        self._process = process
        self._living = living
        self._number = number

        self.pid = process.pid
        self.sentinel = process.sentinel
        self.join = process.join

    @property
    def exitcode(self) -> int | None:
        """The process's exit code. A worker that was killed alone reports SIGKILL."""
        return self._process.exitcode if self._number in self._living else -signal.SIGKILL

    def kill(self) -> None:
        """Close its channel from this side. The process dies with its last worker."""
        self._living.discard(self._number)
        if not self._living:
            self._process.kill()


@dataclass(frozen=True, slots=True, kw_only=True)
class StartEmulated:
    """Starts emulated workers of one node (``Start``). Neighbours share a process."""

    emulated: Emulated
    vocabulary: int

    def __call__(
        self, specs: Sequence[WorkerSpec], ends: Sequence[socket.socket]
    ) -> list[EmulatedWorker]:
        parts: dict[int, list[int]] = {}
        for place, process in enumerate(_shared_out(specs, self.emulated.config.processes)):
            parts.setdefault(process, []).append(place)
        started: dict[int, EmulatedWorker] = {}
        for number, places in sorted(parts.items()):
            mine = [End(ends[place]) for place in places], [specs[place] for place in places]
            process = multiprocessing.get_context("spawn").Process(
                target=main,
                args=(*mine, self.emulated, self.vocabulary),
                name=f"emulated-{number}",
                daemon=True,
            )
            with shielded():
                process.start()
            living = {*places}
            started |= {place: EmulatedWorker(process, living, place) for place in places}
        return [started[place] for place in range(len(specs))]


def _shared_out(specs: Sequence[WorkerSpec], processes: int) -> list[int]:
    units: dict[bool, list[int]] = {}
    for spec in specs:
        units.setdefault(_alone(spec), []).append(_unit(spec))
    shares: list[int] = []
    for spec in specs:
        mine = units[_alone(spec)]
        first, last = min(mine), max(mine)
        shares.append((_unit(spec) - first) * processes // (last - first + 1))
    return shares


def _alone(spec: WorkerSpec) -> bool:
    """Replicas that are separate from engines have their own numbers."""
    return spec.engine is None and spec.config.devices.layout == "separate"


def _unit(spec: WorkerSpec) -> int:
    """Workers of one engine or replica are neighbours."""
    if spec.engine is not None:
        return spec.engine.engine
    assert spec.replica is not None
    return spec.replica.replica
