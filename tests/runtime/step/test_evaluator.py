"""An evaluation over engines that are lost or fail: who samples what, and what is counted."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from io import StringIO
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from rich.console import Console

from rollpacker.config import EvalConfig
from rollpacker.core import decisions as do
from rollpacker.core import events as ev
from rollpacker.core.types import AttemptId, EngineId, Prompt, PromptId, ReplicaId, RoundKind
from rollpacker.data.base import Row
from rollpacker.data.source import PromptSource
from rollpacker.engine.base import Output, Request, SamplingParams
from rollpacker.policy.engines.fleet import Fleet, by_number
from rollpacker.policy.evaluation import EvaluationPolicy
from rollpacker.reward.base import Grade
from rollpacker.runtime.attempts.attempts import Problems
from rollpacker.runtime.evaluate import Evaluator
from rollpacker.runtime.ipc.clock import Clock
from rollpacker.runtime.messages import messages as msg
from rollpacker.runtime.messages.faults import WorkerError
from rollpacker.runtime.pool.pool import Listener, Loss
from rollpacker.runtime.record.progress import Progress
from rollpacker.runtime.step.driver import StepDriver
from rollpacker.runtime.step.responses import Setup

ENGINES, PROBLEMS, EACH, MANY = 3, 7, 2, 1500


class Engines:
    """Note what each is told, and say what a test lets them say."""

    def __init__(self) -> None:
        self.engines = tuple(map(EngineId, range(ENGINES)))
        self.replicas = ()
        self.running: dict[AttemptId, tuple[EngineId, Request]] = {}
        self.seeds: dict[str, list[int]] = defaultdict(list)

    @property
    def fleet(self) -> Fleet:
        return by_number("colocated", self.engines, ())

    @contextmanager
    def listen(self, listener: Listener) -> Iterator[None]:
        self._listener = listener
        yield

    def to_engine(self, engine: EngineId, command: msg.EngineCommand) -> None:
        assert engine in self.engines
        if isinstance(command, msg.Submit):
            for request in command.requests:
                self.running[request.attempt] = engine, request
                self.seeds[request.group].append(request.seed)

    def lose(self, *gone: int) -> None:
        engines = tuple(map(EngineId, gone))
        self.engines = tuple(engine for engine in self.engines if engine not in gone)
        for attempt in [a for a, (engine, _) in self.running.items() if engine in gone]:
            del self.running[attempt]
        self._listener.lost(Loss(engines=engines, replicas=(ReplicaId(0),), text="worker died"))

    def finish(self, attempt: AttemptId) -> None:
        engine, request = self.running.pop(attempt)
        tokens = np.full(request.seed % 5 + 1, 7, np.int32)
        output = Output(
            attempt=attempt,
            tokens=tokens,
            logprobs=np.zeros(len(tokens), np.float32),
            finish_reason="stop",
            weights_version=0,
        )
        self._listener.engine(engine, msg.Finished(outputs=[output]))

    def fail(self, attempt: AttemptId) -> None:
        engine, _ = self.running.pop(attempt)
        self._listener.engine(engine, msg.Failed(attempts=[attempt], error="too long"))


class Graders:
    """At once: a response's reward is its length."""

    needs_group, broken = False, None

    @contextmanager
    def listen(self, take: Callable[[list[Grade]], None]) -> Iterator[None]:
        self._take = take
        yield

    def begin_step(self, step: int, epoch: float | None) -> None:
        assert epoch is None

    def grade(self, attempts: Any, rows: Any, *, training: bool) -> None:
        assert not training
        self._take([Grade(attempt=a.id, reward=float(a.tokens), rewards={}) for a in attempts])


Talk = Callable[[Engines], Awaitable[None]]


def measured(
    talk: Talk, graders: Graders | None = None, problems: int = PROBLEMS
) -> tuple[dict[str, float], Engines, str, list[tuple[str, int, float]]]:
    """Metrics, what was asked of engines, what was said, and the answers in order."""
    said, engines = StringIO(), Engines()
    names = [PromptId(f"p{n}") for n in range(problems)]
    rows = [Row(id=p, prompt=p, answer="", domain="default", columns={}) for p in names]
    tokens = {name: np.zeros(3, np.int32) for name in names}
    source = PromptSource([Prompt(id=name, tokens=3) for name in names], 0)

    async def main() -> dict[str, float]:
        evaluating = asyncio.create_task(evaluator.run(0))
        await asyncio.sleep(0)
        await talk(engines)
        while engines.running:
            engines.finish(next(iter(engines.running)))
            await asyncio.sleep(0)
        async with asyncio.timeout(10.0):
            return await evaluating

    evaluator = Evaluator(
        EvalConfig.model_validate({"data": {"path": "d"}, "num_generations": EACH, "threshold": 3}),
        Setup(
            workers=cast(Any, engines),
            problems=Problems(rows, tokens, source),
            rewards=cast(Any, graders or Graders()),
            params=SamplingParams(max_tokens=9),
            seed=0,
            clock=Clock(),
            lockstep=False,
        ),
        Progress(Console(file=said, width=200)),
        retries=2,
    )
    result = asyncio.run(main())
    answers = [(a.prompt, a.index, a.reward or 0.0) for a in evaluator.graded()]
    return result, engines, said.getvalue(), answers


async def nothing(_engines: Engines) -> None:
    pass


def test_a_reward_of_exactly_the_threshold_is_right() -> None:
    metrics, _, _, answers = measured(nothing)
    rewards = [reward for _, _, reward in answers]
    assert 3 in rewards
    assert metrics["eval/sampled_accuracy"] == np.mean([reward >= 3 for reward in rewards])


def test_what_lost_engines_were_at_goes_on_elsewhere_and_is_the_same() -> None:
    async def lose(engines: Engines) -> None:
        for attempt in list(engines.running)[::3]:
            engines.finish(attempt)
        engines.lose(1)
        await asyncio.sleep(0)
        assert {engine for engine, _ in engines.running.values()} == {0, 2}
        engines.lose(0)
        await asyncio.sleep(0)
        assert {engine for engine, _ in engines.running.values()} == {2}

    whole, _, quiet, answers = measured(nothing)
    less, engines, said, again = measured(lose)
    assert (less, again) == (whole, answers)
    assert all(len({*seeds}) == EACH for seeds in engines.seeds.values())
    assert any(len(seeds) > EACH for seeds in engines.seeds.values())
    assert "evaluation: worker died; lost: engine 1, replica 0" in said
    assert "lost" not in quiet


def test_what_the_lost_said_last_is_not_heard_after_their_loss() -> None:
    """Two that die at once are one loss: no decision may count on the second."""

    async def lose(engines: Engines) -> None:
        for attempt in [a for a, (engine, _) in engines.running.items() if engine == 0]:
            engines.fail(attempt)
        engines.lose(1)
        engines.lose(0)
        await asyncio.sleep(0)

    whole, _, _, answers = measured(nothing)
    less, _, said, again = measured(lose)
    assert (less, again) == (whole, answers)
    assert "evaluation: worker died; worker died; lost: engine 0, engine 1, replica 0" in said
    assert "too long" not in said


def test_very_many_decisions_leave_others_their_turn() -> None:
    begun: list[int] = []

    async def look(engines: Engines) -> None:
        begun.append(len(engines.running))
        while len(engines.running) < MANY * EACH:
            await asyncio.sleep(0)

    assert measured(look, problems=MANY)[0]["eval/problems"] == MANY
    assert begun == [0]


def test_without_an_engine_it_ends() -> None:
    async def lose(engines: Engines) -> None:
        engines.lose(0, 1, 2)

    with pytest.raises(WorkerError, match=r"^evaluation: worker died; no engine is left$"):
        measured(lose)


def test_an_answer_that_engines_fail_to_give_is_one_without_a_reward() -> None:
    async def fail(engines: Engines) -> None:
        first, second, *_ = engines.running
        seed, tried = engines.running[first][1].seed, list[int]()
        while again := [a for a, (_, request) in engines.running.items() if request.seed == seed]:
            tried.append(engines.running[again[0]][0])
            engines.fail(again[0])
            await asyncio.sleep(0)
        assert tried == [0, 1, 2]
        engines.fail(second)

    _, _, _, answers = measured(nothing)
    result, _, said, again = measured(fail)
    assert again == answers[1:]
    assert result["eval/ungraded"] == 1.0
    assert said.count("evaluation: the answer to problem p0: too long") == 1


class Alone(Graders):
    """Would compare the answers to a problem."""

    needs_group = True

    def grade(self, attempts: Any, rows: Any, *, training: bool) -> None:
        assert len(attempts) == 1
        super().grade(attempts, rows, training=training)


def test_rewards_that_compare_responses_see_each_answer_alone() -> None:
    assert measured(nothing, Alone())[3] == measured(nothing)[3]


def test_what_its_environment_was_at_begins_again_elsewhere() -> None:
    """As another attempt: the lost one's environment may still answer."""
    policy = EvaluationPolicy([PromptId("p")], answers=2, retries=0)

    def told(event: ev.Event) -> list[do.Decision]:
        return policy.handle(0.0, event)

    both = tuple(map(EngineId, (0, 1)))
    first, second = told(ev.StepStarted(step=0, engines=both, replicas=(), remaining={}))
    assert isinstance(first, do.StartAttempt)
    assert isinstance(second, do.StartAttempt)
    turn = ev.TurnFinished(attempt=first.attempt, turn=0, tokens=1, finish_reason="stop")
    assert told(turn) == [do.StepEnvironment(attempt=first.attempt)]
    again, also = told(ev.DevicesLost(engines=(EngineId(0),), replicas=()))
    assert isinstance(again, do.StartAttempt)
    assert isinstance(also, do.StartAttempt)
    assert [(a.index, a.engine) for a in (again, also)] == [(0, 1), (1, 1)]
    assert len({first.attempt, second.attempt, again.attempt, also.attempt}) == 4
    assert told(ev.EnvironmentReplied(attempt=first.attempt, turn=0, tokens=1, seconds=0.1)) == []
    for attempt in (again.attempt, also.attempt):
        assert policy.missing > 0
        told(ev.AttemptFinished(attempt=attempt, tokens=1, finish_reason="stop"))
        told(ev.AttemptGraded(attempt=attempt, reward=None))
    assert policy.missing == 0


def test_a_loss_is_told_before_what_stops_with_it() -> None:
    """A round that ends must know which gradients are gone."""
    engines, prompt, heard = Engines(), PromptId("p"), list[ev.Event]()
    lost, other = (
        do.StartAttempt(attempt=AttemptId(n), prompt=prompt, index=n, engine=EngineId(n))
        for n in range(2)
    )
    stop = do.AbortAttempt(attempt=lost.attempt)
    over = do.FinishRollout(step=0, round=RoundKind.FULL)
    made = iter([[lost, other], [stop], [], [over]])
    tokens = {prompt: np.zeros(3, np.int32)}
    setup = Setup(
        workers=cast(Any, engines),
        problems=cast(Any, SimpleNamespace(tokens=tokens, remaining=dict)),
        rewards=cast(Any, Graders()),
        params=SamplingParams(max_tokens=9),
        seed=0,
        clock=Clock(),
        lockstep=False,
    )
    policy = cast(Any, SimpleNamespace(handle=lambda *_: next(made)))
    driver = StepDriver(setup, policy, lambda _now, event, _made: heard.append(event))

    async def main() -> None:
        with driver.begin(0):
            rolling = asyncio.create_task(driver.roll_out())
            await asyncio.sleep(0)
            engines.finish(other.attempt)
            await asyncio.sleep(0)
            engines.lose(0)
            await rolling

    asyncio.run(main())
    assert heard[2:] == [
        ev.DevicesLost(engines=(lost.engine,), replicas=(ReplicaId(0),)),
        ev.AttemptAborted(attempt=lost.attempt, tokens=0),
    ]
