"""The real runtime driver on a virtual clock, and the simulator, given the same script.

Real: ``Rollout``, its pump, ``Updates``, ``StepRecord``, the policy, the data source and the
scripted engine. Virtual: the worker and reward processes, which keep the order of work of
``runtime.worker`` and take the simulator's costs. Messages take no time.
"""

import asyncio
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from rollpacker import config
from rollpacker.config import FakeEngineConfig, RolloutConfig, RunConfig
from rollpacker.core.types import Prompt, PromptId, WorkerId, sampling_seed
from rollpacker.data.base import Row
from rollpacker.data.source import PromptSource
from rollpacker.engine.base import SamplingParams
from rollpacker.engine.fake import FakeEngine, scripted_length
from rollpacker.policy.rollout import RolloutPolicy
from rollpacker.policy.settings import RolloutSettings, asynchronous_grading, streaming_rules
from rollpacker.reward.base import Grade
from rollpacker.runtime import messages as msg
from rollpacker.runtime.problems import Problems
from rollpacker.runtime.rollout import Rollout
from rollpacker.runtime.updates import Updates
from rollpacker.sim.agenda import Agenda
from rollpacker.sim.costs import CurveCosts, RewardCosts, TrainCosts
from rollpacker.sim.hardware import MeasuredDevice
from rollpacker.sim.world import World, WorldCosts
from rollpacker.train import algorithms
from rollpacker.train.base import Partial, Update

PROMPT_TOKENS = 7
LATENCY = {1: 0.0101, 4: 0.0117, 16: 0.0239, 64: 0.0711}


@dataclass(frozen=True, kw_only=True)
class Script:
    """A job that both drivers run."""

    rollout: dict
    sizes: dict[str, int]
    lengths: list[int]
    cap: int
    steps: int
    kinds: dict[str, str] = field(default_factory=dict)
    workers: int = 3
    concurrency: int = 64
    seed: int = 0
    ordered: bool = False
    updates: int = 1
    judge_slots: int = 4

    def costs(self) -> WorldCosts:
        device = MeasuredDevice(
            latency=LATENCY, kv_tokens=10**9, prefill_token_s=0.0, context_token_s=1.7e-6
        )
        return WorldCosts(
            workers=self.workers,
            engines=1,
            engine=CurveCosts(device),
            max_running=self.concurrency,
            train=TrainCosts(launch_s=0.0113, token_s=3.1e-4, prompt_tokens=PROMPT_TOKENS),
            start_s=0.37,
            sync_s=0.21,
            apply_s=0.0531,
            rewards=RewardCosts(
                math_s=0.0457, judge_s=0.317, judge_idle=1.0, judge_slots=self.judge_slots
            ),
            kinds=dict(self.kinds),
        )

    def settings(self) -> RolloutSettings:
        rollout = RolloutConfig.model_validate(self.rollout)
        rules = streaming_rules(
            rollout,
            latency=LATENCY,
            workers=self.workers,
            whole_batch=self.updates > 1,
            ordered=self.ordered,
            updates=self.updates,
        )
        return RolloutSettings(
            rollout=rollout,
            seed=self.seed,
            sizes=dict(self.sizes),
            cap=self.cap,
            latency=LATENCY,
            asynchronous_grading=asynchronous_grading(rollout, None),
            rules=rules,
        )

    def engine(self) -> FakeEngineConfig:
        return FakeEngineConfig(lengths=self.lengths)

    def source(self) -> PromptSource:
        prompts = [
            Prompt(id=PromptId(f"{domain}{i}"), domain=domain, tokens=PROMPT_TOKENS)
            for domain, count in self.sizes.items()
            for i in range(count)
        ]
        return PromptSource(prompts, self.seed)


@dataclass
class Journal:
    """Every event with its decisions."""

    lines: list[tuple] = field(default_factory=list)

    def record(self, now, event, made) -> None:
        self.lines.append((now, event, list(made)))


def next_epoch(source: PromptSource, policy: RolloutPolicy) -> None:
    if not sum(source.remaining().values()) + policy.held:
        source.next_epoch()


# The simulator -------------------------------------------------------------------------------


class ScriptedWorkload:
    """What a world samples, from the script."""

    prompt_tokens = PROMPT_TOKENS

    def __init__(self, script: Script) -> None:
        self.source = script.source()
        self._seed = script.seed
        self._engine = script.engine()

    def remaining(self):
        return self.source.remaining()

    def draw(self, counts):
        return self.source.draw(counts)

    def length(self, step, prompt, index) -> int:
        return scripted_length(self._engine, sampling_seed(self._seed, step, prompt, index))

    def domain(self, prompt) -> str:
        return prompt.rstrip("0123456789")

    def forget(self, prompt) -> None:
        pass


def simulate(script: Script) -> Journal:
    journal = Journal()
    policy = RolloutPolicy(script.settings())
    workload = ScriptedWorkload(script)
    world = World(policy, workload, script.costs(), cap=script.cap, record=journal.record)
    for step in range(script.steps):
        next_epoch(workload.source, policy)
        world.run_step(step)
    return journal


# The runtime ---------------------------------------------------------------------------------


class VirtualClock:
    def __init__(self, agenda: Agenda) -> None:
        self._agenda = agenda

    def __call__(self) -> float:
        return self._agenda.now

    def at(self, monotonic: float) -> float:
        return monotonic


class VirtualWorker:
    """Serves as ``runtime.worker.Worker`` does: commands first, then decoding, then gradients."""

    def __init__(self, id_: WorkerId, script: Script, agenda: Agenda, report) -> None:
        self.engine = FakeEngine(script.engine(), concurrency=script.concurrency)
        self._id, self._script, self._agenda, self._report = id_, script, agenda, report
        self._costs = script.costs()
        self._inbox: deque[msg.Command] = deque()
        self._contexts: dict[int, int] = {}
        self._tasks: deque[msg.Accumulate] = deque()
        self._busy = False

    def receive(self, command: msg.Command) -> None:
        self._inbox.append(command)
        if not self._busy:
            self._busy = True
            # Whatever else is sent at this instant is read first.
            self._agenda.after(0.0, self._serve)

    def _serve(self) -> None:
        while self._inbox:
            command = self._inbox.popleft()
            if isinstance(command, msg.Apply):
                self._agenda.after(self._costs.apply_s, self._applied)
                return
            self._handle(command)
        self._busy = self.engine.busy() or bool(self._tasks)
        if self.engine.busy():
            self._agenda.after(self._step_s(), self._decoded)
        elif self._tasks:
            task = self._tasks.popleft()
            start = self._agenda.now
            self._agenda.after(self._gradient_s(task), lambda: self._accumulated(task, start))

    def _tell(self, report: msg.Report) -> None:
        """What the driver sends back at once is read before the next step begins."""
        self._report(self._id, report)
        self._agenda.after(0.0, self._serve)

    def _handle(self, command: msg.Command) -> None:
        match command:
            case msg.BeginStep():
                self.engine.load_weights(None, command.version)
            case msg.Submit():
                self.engine.submit(command.requests)
                for request in command.requests:
                    self._contexts[request.attempt] = len(request.prompt) + len(request.generated)
            case msg.Abort():
                outputs = self.engine.abort(command.attempts)
                self._forget(outputs)
                self._report(self._id, msg.Aborted(outputs=outputs))
            case msg.Accumulate():
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
        return self._costs.engine.step_s(len(running), context + len(running) / 2)

    def _decoded(self) -> None:
        for attempt in self._running():
            self._contexts[attempt] += 1
        outputs = self.engine.step()
        self._forget(outputs)
        if outputs:
            self._tell(msg.Finished(outputs=outputs))
        else:
            self._serve()

    def _gradient_s(self, task: msg.Accumulate) -> float:
        train = self._costs.train
        return sum(train.sequence_s(len(s.tokens)) for group in task.groups for s in group.samples)

    def _accumulated(self, task: msg.Accumulate, start: float) -> None:
        tokens = sum(len(sample.tokens) for group in task.groups for sample in group.samples)
        partial = Partial(normaliser=float(tokens), tokens=tokens, sums={})
        end = self._agenda.now
        report = msg.Accumulated(parts=task.parts, partial=partial, start_s=start, end_s=end)
        self._tell(report)

    def _applied(self) -> None:
        now = self._agenda.now
        work = msg.Work(
            decode_steps=self.engine.stats().steps,
            generated_tokens=self.engine.stats().generated_tokens,
            prefill_tokens=0,
            preemptions=0,
            cpu_s=0.0,
            decode_cpu_s=0.0,
        )
        update = Update(applied=True, grad_norm=1.0, learning_rate=1e-3, metrics={})
        start = now - self._costs.apply_s
        report = msg.Applied(update=update, checksum=0, work=work, start_s=start, end_s=now)
        self._tell(report)


class VirtualPool:
    """``WorkerPool`` without processes."""

    def __init__(self, script: Script, agenda: Agenda) -> None:
        self._workers = {
            WorkerId(i): VirtualWorker(WorkerId(i), script, agenda, self._tell)
            for i in range(script.workers)
        }
        self.on_report = lambda _worker, _report: None
        self.on_lost = lambda _worker, _error: None

    @property
    def workers(self) -> tuple[WorkerId, ...]:
        return tuple(self._workers)

    def _tell(self, worker, report) -> None:
        self.on_report(worker, report)

    def meet(self) -> None:
        pass

    def send(self, worker, command) -> None:
        self._workers[worker].receive(command)

    def broadcast(self, command) -> None:
        for worker in self._workers:
            self.send(worker, command)


class VirtualRewards:
    """``Rewards`` without processes: as many as needed for math, some slots for the judge."""

    needs_group = False

    def __init__(self, script: Script, agenda: Agenda) -> None:
        self._script, self._agenda = script, agenda
        self._costs = script.costs().rewards
        self._wanted: dict[int, float] = {}
        self._queue: deque[int] = deque()
        self._free = script.judge_slots
        self.on_grades = lambda _grades: None

    def grade(self, attempts, rows) -> None:
        for attempt in attempts:
            self._wanted[attempt.id] = float(attempt.index % 2)
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
        self._judge()

    def _graded(self, id_: int) -> None:
        reward = self._wanted.pop(id_, None)
        if reward is not None:
            self.on_grades([Grade(attempt=id_, reward=reward, rewards={})])

    def cancel(self, attempt) -> None:
        self._wanted.pop(attempt, None)

    def pending(self) -> dict:
        return dict(self._wanted)


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

    def __init__(self, script: Script) -> None:
        self._script = script
        self.agenda = Agenda()
        self.run = VirtualRun()
        clock = VirtualClock(self.agenda)
        source = script.source()
        prompts = [p for members in source._prompts.values() for p in members]
        rows = [Row(id=p.id, prompt="", answer="", domain=p.domain, columns={}) for p in prompts]
        tokens = {p.id: np.zeros(p.tokens, np.int32) for p in prompts}
        self.problems = Problems(rows, tokens, source)
        self.policy = RolloutPolicy(script.settings())
        run = run_config(script)
        pool = VirtualPool(script, self.agenda)
        algorithm = algorithms.build(run.train.algorithm)
        self.rollout = Rollout(
            run,
            self.policy,
            pool=pool,
            problems=self.problems,
            rewards=VirtualRewards(script, self.agenda),
            updates=Updates(pool, algorithm, max_length=script.cap, clock=clock),
            params=SamplingParams(max_tokens=script.cap),
            journal=self.run.journal,
            clock=clock,
        )

    async def steps(self) -> VirtualRun:
        costs = self._script.costs()
        for step in range(self._script.steps):
            next_epoch(self.problems.source, self.policy)
            self._sleep(costs.sync_s + costs.start_s)
            task = asyncio.create_task(self.rollout.run_step(step))
            await asyncio.sleep(0)
            while not task.done():
                assert self.agenda.run_next(), "nothing is left to happen"
                await asyncio.sleep(0)
            self.run.records.append(task.result())
        return self.run

    def _sleep(self, seconds: float) -> None:
        awake: list[bool] = []
        self.agenda.after(seconds, lambda: awake.append(True))
        while not awake:
            self.agenda.run_next()


def run_runtime(script: Script) -> VirtualRun:
    return asyncio.run(Runtime(script).steps())
