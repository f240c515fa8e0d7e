"""The real runtime driver on a virtual clock, and the simulator, given the same script.

Real: ``StepDriver``, ``Updates``, ``StepRecord``, the policy, the data source and the
scripted engine. Virtual: the worker and reward processes, which keep the order of work of
``runtime.worker`` and take the simulator's costs. Messages take no time.
"""

import asyncio
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
from scripted_job import Journal, Script, next_epoch, scripted_reward
from virtual_episodes import TurnEngine, virtual_episodes

from rollpacker import config
from rollpacker.config import RunConfig
from rollpacker.core.types import EngineId, sampling_seed
from rollpacker.data.base import Row
from rollpacker.engine.base import SamplingParams
from rollpacker.policy.engines.fleet import Fleet, by_number
from rollpacker.policy.rollout import RolloutPolicy
from rollpacker.reward.base import Grade
from rollpacker.runtime.attempts.attempts import Problems
from rollpacker.runtime.messages import messages as msg
from rollpacker.runtime.step.driver import train_driver
from rollpacker.runtime.step.responses import Setup
from rollpacker.runtime.step.updates import Updates
from rollpacker.sim.world.agenda import Agenda
from rollpacker.train import algorithms
from rollpacker.train.base import Partial, Update

# The runtime ---------------------------------------------------------------------------------


class VirtualClock:
    def __init__(self, agenda: Agenda) -> None:
        self._agenda = agenda

    def __call__(self) -> float:
        return self._agenda.now

    def at(self, monotonic: float) -> float:
        return monotonic


class VirtualWorker:
    """Serves as ``runtime.worker.Server`` does: commands first, then decoding, then gradients."""

    def __init__(self, id_: EngineId, script: Script, agenda: Agenda, report, wake) -> None:
        self._wake = wake
        self.engine = TurnEngine(script)
        self._id, self._script, self._agenda, self._report = id_, script, agenda, report
        self._costs = script.costs()
        self._inbox: deque[msg.Command] = deque()
        self._contexts: dict[int, int] = {}
        self._tasks: deque[msg.Accumulate | msg.Score] = deque()
        self._busy = self._apply = False

    def receive(self, command: msg.Command) -> None:
        self._inbox.append(command)
        if not self._busy:
            self._busy = True
            self._wake(self._id)

    def begin(self) -> None:
        """Whatever is next."""
        if self._apply:
            self._apply = False
            self._agenda.after(self._costs.apply_s, self._applied)
            return
        self._busy = self.engine.busy() or bool(self._tasks)
        if self.engine.busy():
            self._agenda.after(self._step_s(), self._decoded)
        elif self._tasks:
            task = self._tasks.popleft()
            start = self._agenda.now
            done = self._accumulated if isinstance(task, msg.Accumulate) else self._scored
            self._agenda.after(self._gradient_s(task), lambda: done(task, start))

    def _go_on(self) -> None:
        """What the driver sends back at once is read before the next step begins."""
        self.read()
        self._wake(self._id)

    def read(self) -> None:
        while self._inbox:
            self._handle(self._inbox.popleft())

    def _handle(self, command: msg.Command) -> None:
        match command:
            case msg.Apply():
                self._apply = True
            case msg.BeginStep():
                pass
            case msg.LoadWeights():
                self.engine.load_weights(None, command.version)
                report = msg.WeightsLoaded(version=command.version, work=self._work())
                self._report(self._id, report)
            case msg.Submit():
                self.engine.submit(command.requests)
                for request in command.requests:
                    self._contexts[request.attempt] = len(request.prompt) + len(request.generated)
            case msg.Abort():
                outputs = self.engine.abort(command.attempts)
                self._forget(outputs)
                self._report(self._id, msg.Aborted(outputs=outputs))
            case msg.Accumulate() | msg.Score():
                self._tasks.append(command)
            case _:
                raise AssertionError(command)

    def _forget(self, outputs) -> None:
        for output in outputs:
            del self._contexts[output.attempt]

    def _running(self) -> list[int]:
        return list(self._contexts)[: self._script.concurrency]

    def _step_s(self) -> float:
        running = self._running()
        context = sum(self._contexts[attempt] for attempt in running)
        return self._costs.engine(1).step_s(len(running), context + len(running) / 2)

    def _decoded(self) -> None:
        for attempt in self._running():
            self._contexts[attempt] += 1
        outputs = self.engine.step()
        self._forget(outputs)
        if outputs:
            self._report(self._id, msg.Finished(outputs=outputs))
        self._go_on()

    def _gradient_s(self, task: msg.Accumulate | msg.Score) -> float:
        """As a trainer, which passes over groups whose advantages are zero."""
        trained = [group.samples for group in task.groups if group.advantages.any()]
        return sum(self._costs.train.sequence_s(len(s.tokens)) for group in trained for s in group)

    def _accumulated(self, task: msg.Accumulate, start: float) -> None:
        tokens = sum(len(sample.tokens) for group in task.groups for sample in group.samples)
        partial = Partial(normaliser=float(tokens), tokens=tokens, sums={})
        end = self._agenda.now
        report = msg.Accumulated(parts=task.parts, partial=partial, start_s=start, end_s=end)
        self._report(self._id, report)
        self._go_on()

    def _scored(self, task: msg.Score, start: float) -> None:
        logprobs = {(s.prompt, s.index): s.logprobs for g in task.groups for s in g.samples}
        report = msg.ScoredSamples(logprobs=logprobs, start_s=start, end_s=self._agenda.now)
        self._report(self._id, report)
        self._go_on()

    def _work(self) -> msg.Work:
        return msg.Work(
            decode_steps=self.engine.stats().steps,
            generated_tokens=self.engine.stats().generated_tokens,
            prefill_tokens=0,
            preemptions=0,
            cpu_s=0.0,
            decode_cpu_s=0.0,
        )

    def _applied(self) -> None:
        now = self._agenda.now
        update = Update(applied=True, grad_norm=1.0, learning_rate=1e-3, metrics={})
        start = now - self._costs.apply_s
        report = msg.Applied(update=update, checksum=0, start_s=start, end_s=now)
        self._report(self._id, report)
        self._go_on()


class VirtualPool:
    """``WorkerPool`` without processes."""

    def __init__(self, script: Script, agenda: Agenda) -> None:
        self._workers = {
            EngineId(i): VirtualWorker(EngineId(i), script, agenda, self._tell, self._wake)
            for i in range(script.workers)
        }
        self._agenda = agenda
        self._awake: set[EngineId] = set()
        self._told = False
        self._listener = None

    @property
    def engines(self) -> tuple[EngineId, ...]:
        return tuple(self._workers)

    replicas = engines

    @contextmanager
    def listen(self, listener):
        self._listener = listener
        yield
        self._listener = None

    def unheard(self) -> list[str]:
        return []

    def _tell(self, worker, report) -> None:
        if worker not in self._workers:
            return
        self._told = True
        if self._listener is not None:
            of_engine = isinstance(report, msg.EngineReport)
            (self._listener.engine if of_engine else self._listener.replica)(worker, report)

    def _wake(self, worker: EngineId) -> None:
        """When this instant is over, lowest worker first."""
        if worker not in self._workers:
            return
        if not self._awake:
            self._agenda.after(0.0, self._serve)
        self._awake.add(worker)

    def _serve(self) -> None:
        self._told = False
        for worker in sorted(self._awake):
            self._workers[worker].read()
        if self._told:
            self._agenda.after(0.0, self._serve)
            return
        awake, self._awake = sorted(self._awake), set()
        for worker in awake:
            self._workers[worker].begin()

    transport = None

    @property
    def fleet(self) -> Fleet:
        return by_number("colocated", self.engines, self.replicas)

    def load_weights(self, version: int, weights: None) -> None:
        for engine in self.engines:
            self.to_engine(engine, msg.LoadWeights(version=version, weights=weights))

    def disband(self) -> dict[EngineId, int]:
        return {}

    def meet(self) -> None:
        pass

    def to_engine(self, engine, command) -> None:
        if engine in self._workers:
            self._workers[engine].receive(command)

    to_replica = to_engine


class VirtualRewards:
    """``Rewards`` without processes: as many as needed for math, some slots for the judge."""

    needs_group = False
    broken = None

    def __init__(self, script: Script, agenda: Agenda) -> None:
        self._script, self._agenda = script, agenda
        self._costs = script.costs().rewards
        self._wanted: dict[int, float] = {}
        self._queue: deque[int] = deque()
        self._free = script.judge_slots
        self._take = lambda _grades: None

    @contextmanager
    def listen(self, take):
        self._take = take
        yield

    def begin_step(self, step, epoch) -> None:
        del step, epoch

    def grade(self, attempts, rows, *, training=True) -> None:
        for attempt in attempts:
            step = attempt.oldest(attempt.output.weights_version)
            seed = sampling_seed(self._script.seed, step, attempt.prompt, attempt.index)
            self._wanted[attempt.id] = scripted_reward(seed)
            kind = self._script.kinds.get(rows[attempt.prompt].domain, "none")
            if kind == "judge":
                self._queue.append(attempt.id)
            else:
                seconds = self._costs.math_s if kind == "math" else 0.0
                self._agenda.after(seconds, lambda id_=attempt.id: self._graded(id_))
        self._judge()

    def _judge(self) -> None:
        while self._queue and self._free:
            id_ = self._queue.popleft()
            if id_ in self._wanted:
                self._free -= 1
                self._agenda.after(self._costs.judge_s, lambda id_=id_: self._judged(id_))

    def _judged(self, id_: int) -> None:
        self._free += 1
        self._graded(id_)
        # Who ends at the same instant is heard first: it may make the next one unwanted.
        self._agenda.after(0.0, self._judge)

    def _graded(self, id_: int) -> None:
        reward = self._wanted.pop(id_, None)
        if reward is not None:
            self._take([Grade(attempt=id_, reward=reward, rewards={})])

    def recall(self, prompt, grade) -> None:
        del prompt, grade

    def cancel(self, attempt) -> None:
        self._wanted.pop(attempt, None)

    def pending(self) -> dict:
        return dict(self._wanted)

    def end_step(self) -> list:
        return []


def run_config(script: Script) -> RunConfig:
    tree = {
        "model": {"path": "m"},
        "data": {"path": "d"},
        "rewards": [{"function": "math"}],
        "seed": script.seed,
        "rollout": script.rollout,
    }
    return config.parse(tree)


@dataclass
class VirtualRun:
    """What the runtime did, and its records by step."""

    journal: Journal = field(default_factory=Journal)
    records: list = field(default_factory=list)


class Runtime:
    """The real driver with its virtual processes."""

    def __init__(self, script: Script, pool=VirtualPool, *, sampler_is_old: bool = True) -> None:
        self._script = script
        self.agenda = Agenda()
        self.run = VirtualRun()
        clock = VirtualClock(self.agenda)
        source = script.source()
        prompts = [p for members in source._prompts.values() for p in members]
        rows = [Row(id=p.id, prompt="", answer="", domain=p.domain, columns={}) for p in prompts]
        tokens = {p.id: np.zeros(p.tokens, np.int32) for p in prompts}
        self.problems = Problems(rows, tokens, source, chat=lambda row: [])
        self.policy = RolloutPolicy(script.settings())
        run = run_config(script)
        self.pool = pool = pool(script, self.agenda)
        algorithm = algorithms.build(run.train.algorithm)
        old = {"sampler_is_old": sampler_is_old}
        setup = Setup(
            workers=pool,
            problems=self.problems,
            rewards=VirtualRewards(script, self.agenda),
            params=SamplingParams(max_tokens=script.cap),
            seed=run.seed,
            clock=clock,
            lockstep=run.deterministic,
            episodes=virtual_episodes(script, self.agenda, clock, lambda: self.driver.record.step),
        )
        updates = Updates(pool, algorithm, max_length=script.cap, clock=clock, **old)
        self.driver = train_driver(run, setup, self.policy, self.run.journal.record, updates)

    async def steps(self) -> None:
        costs = self._script.costs()
        for step in range(self._script.steps):
            next_epoch(self.problems.source, self.policy)
            self._sleep(costs.sync_s + costs.start_s)
            task = asyncio.create_task(self.driver.step(step))
            await asyncio.sleep(0)
            while not task.done():
                assert self.agenda.run_next(), "nothing is left to happen"
                await asyncio.sleep(0)
            self.run.records.append(task.result())

    def _sleep(self, seconds: float) -> None:
        awake: list[bool] = []
        self.agenda.after(seconds, lambda: awake.append(True))
        while not awake:
            self.agenda.run_next()


def run_runtime(script: Script) -> VirtualRun:
    runtime = Runtime(script)
    # Python 3.11 spells out what the task returns: nothing, not the whole run.
    asyncio.run(runtime.steps())
    return runtime.run
