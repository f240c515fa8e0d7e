"""A step without a process besides the driver's: engine and replica on devices of their own."""

import asyncio
from collections import deque
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from runtime_jobs import Workshop

from rollpacker.core.types import AttemptId, EngineId, Prompt, ReplicaId
from rollpacker.data.base import Row
from rollpacker.data.source import PromptSource
from rollpacker.engine.base import Request, SamplingParams
from rollpacker.engine.configured import build_engine
from rollpacker.policy.engines.fleet import by_number
from rollpacker.policy.rollout import RolloutPolicy
from rollpacker.policy.settings import RolloutSettings
from rollpacker.reward.base import Grade
from rollpacker.runtime.attempts.attempts import Problems
from rollpacker.runtime.ipc.clock import Clock
from rollpacker.runtime.messages import messages as msg
from rollpacker.runtime.pool.pool import Listener
from rollpacker.runtime.step.driver import StepDriver, train_driver
from rollpacker.runtime.step.publishing import publish
from rollpacker.runtime.step.responses import Setup
from rollpacker.runtime.step.updates import Updates
from rollpacker.runtime.worker.engine_worker import EngineWorker
from rollpacker.runtime.worker.train_worker import TrainWorker
from rollpacker.train import algorithms
from rollpacker.train.model.loading import load_model
from rollpacker.train.trainer import Trainer

CAP = 24


class InProcess:
    """One real engine and one real replica, each with a model of its own, served in turn."""

    def __init__(self, config) -> None:
        model, tokenizer = load_model(config.model, "cpu")
        self.trainer = Trainer(model, tokenizer, config.train, temperature=1.0)
        self.engine = build_engine(config, load_model(config.model, "cpu")[0], tokenizer)
        self.tokenizer = tokenizer
        engine = EngineWorker(self.engine, self._from_engine, self.trainer.weights)
        self._roles = {"engine": engine, "replica": TrainWorker(self.trainer, self._from_replica)}
        self._inbox: deque = deque()
        self._listener: Listener | None = None
        self.engines, self.replicas = (EngineId(0),), (ReplicaId(0),)

    def _from_engine(self, report) -> None:
        self._listener.engine(EngineId(0), report)

    def _from_replica(self, report) -> None:
        self._listener.replica(ReplicaId(0), report)

    def to_engine(self, _engine, command) -> None:
        self._inbox.append(("engine", command))

    def to_replica(self, _replica, command) -> None:
        self._inbox.append(("replica", command))

    transport = None

    @property
    def fleet(self):
        return by_number("separate", self.engines, self.replicas)

    def load_weights(self, version, weights) -> None:
        self.to_engine(0, msg.LoadWeights(version=version, weights=weights))

    def disband(self) -> dict:
        return {}

    def meet(self) -> None:
        pass

    def unheard(self) -> list[str]:
        return []

    @contextmanager
    def listen(self, listener: Listener):
        self._listener = listener
        yield

    async def serve(self) -> None:
        while True:
            await asyncio.sleep(0)
            if self._inbox:
                role, command = self._inbox.popleft()
                self._roles[role].commands[type(command)](command)
                continue
            for role in self._roles.values():
                if role.busy():
                    role.work()
                    break


class Counting:
    """Grades at once: the share of a token."""

    broken = None
    needs_group = False

    @contextmanager
    def listen(self, take):
        self._take = take
        yield

    def begin_step(self, step, epoch=None) -> None:
        pass

    def grade(self, attempts, rows, *, training=True) -> None:
        del rows, training
        grades = [
            Grade(attempt=a.id, reward=float(np.mean(a.output.tokens % 2)), rewards={})
            for a in attempts
        ]
        asyncio.get_running_loop().call_soon(self._take, grades)

    def cancel(self, attempt) -> None:
        pass

    def pending(self) -> dict:
        return {}

    def end_step(self) -> list[str]:
        return []


class Lines:
    """A journal that is a list."""

    def __init__(self) -> None:
        self.events: list = []

    def record(self, _now, event, made) -> None:
        self.events.append((event, list(made)))


def driver(config, workers: InProcess, journal: Lines) -> StepDriver:
    rows = [
        Row(id=f"p{i}", prompt=f"00{i}", answer="", domain="default", columns={}) for i in "0123"
    ]
    tokens = {r.id: np.array(workers.tokenizer.encode(r.prompt), np.int32) for r in rows}
    prompts = [Prompt(id=r.id, tokens=len(tokens[r.id])) for r in rows]
    source = PromptSource(prompts, config.seed, shuffle=False)
    settings = RolloutSettings.of(
        config.rollout,
        seed=config.seed,
        sizes=source.quotas,
        cap=CAP,
        latency={1: 1e-3, 64: 1e-3},
        engines=1,
        whole_batch=False,
        asynchronous=True,
    )
    clock = Clock()
    algorithm = algorithms.build(config.train.algorithm)
    setup = Setup(
        workers=workers,
        problems=Problems(rows, tokens, source),
        rewards=Counting(),
        params=SamplingParams(max_tokens=CAP, stop_token_ids=(workers.tokenizer.eos_token_id,)),
        seed=config.seed,
        clock=clock,
        lockstep=config.deterministic,
    )
    updates = Updates(workers, algorithm, max_length=CAP, clock=clock)
    return train_driver(config, setup, RolloutPolicy(settings), journal.record, updates)


async def two_steps(config, workers: InProcess, journal: Lines) -> list:
    steps = driver(config, workers, journal)
    serving = asyncio.create_task(workers.serve())
    await publish(workers, 0)
    records = [await steps.step(step) for step in range(2)]
    serving.cancel()
    return records


def test_a_step_needs_no_processes_and_no_shared_weights(tmp_path: Path) -> None:
    shop = Workshop(tmp_path)
    config = shop.config("in", rollout__prompts_per_step=2, rollout__max_completion_length=CAP)
    workers, journal = InProcess(config), Lines()
    before = workers.trainer.checksum()
    first, second = asyncio.run(two_steps(config, workers, journal))
    assert [len(record.kept) for record in (first, second)] == [6, 6]
    assert all(record.updates[0].applied for record in (first, second))
    assert workers.trainer.checksum() != before
    assert {a.output.weights_version for a in first.kept} == {0}
    assert {a.output.weights_version for a in second.kept} == {1}
    assert list(second.work) == [EngineId(0)]
    # The engine has what the replica has made: it decodes as the trained model itself.
    kept, params = second.kept[0], SamplingParams(max_tokens=CAP)
    again = Request(
        attempt=AttemptId(10_000),
        group=kept.prompt,
        prompt=kept.prompt_tokens,
        params=params,
        seed=7,
    )
    fresh = build_engine(config, workers.trainer._model, workers.tokenizer)
    fresh.load_weights(None, 2)
    answers = []
    for engine in (workers.engine, fresh):
        engine.submit([again])
        while not (out := engine.step()):
            pass
        answers.append(out[0])
    assert np.array_equal(answers[0].tokens, answers[1].tokens)
    assert answers[0].weights_version == answers[1].weights_version == 2
