"""Requests on their way to the engines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from rollpacker.core import decisions as do
from rollpacker.core import events as ev
from rollpacker.core.types import AttemptId, Drafted, EngineId, PromptId
from rollpacker.engine.base import Output, SamplingParams
from rollpacker.policy.engines.fleet import by_number
from rollpacker.runtime.attempts.carried import nothing_known
from rollpacker.runtime.ipc.clock import Clock
from rollpacker.runtime.messages import messages as msg
from rollpacker.runtime.step.responses import Decoding, Setup
from rollpacker.runtime.step.step import StepRecord

ENGINES, EACH = 8, 400
CLOCK = Clock()


class Engines:
    """Notes what each engine is told."""

    def __init__(self) -> None:
        self.engines = tuple(map(EngineId, range(ENGINES)))
        self.told: dict[EngineId, list[Any]] = {engine: [] for engine in self.engines}

    def to_engine(self, engine: EngineId, command: Any) -> None:
        self.told[engine].append(command)

    def submitted(self) -> int:
        told = [c for commands in self.told.values() for c in commands]
        return sum(len(c.requests) for c in told if isinstance(c, msg.Submit))


def decoding(
    engines: Engines, folder: Path, lockstep: bool, clock: Callable[[], float] = CLOCK
) -> tuple[Decoding, StepRecord]:
    """With attempts that are started and not sent yet."""
    setup = Setup(
        workers=cast(Any, engines),
        problems=cast(Any, SimpleNamespace(tokens={PromptId("p"): np.zeros(3, np.int32)})),
        rewards=cast(Any, None),
        params=SamplingParams(max_tokens=4),
        seed=0,
        clock=cast(Any, clock),
        lockstep=lockstep,
    )
    decoding = Decoding(setup, nothing_known, None, post=print)
    record = StepRecord(step=0, start_s=0.0)
    decoding.begin(record)
    for n in range(ENGINES * EACH):
        engine = EngineId(n // EACH)
        decoding.start(
            do.StartAttempt(attempt=AttemptId(n), prompt=PromptId("p"), index=n, engine=engine)
        )
    return decoding, record


def test_a_large_step_is_sent_a_part_at_a_time_without_what_is_aborted_by_then(
    tmp_path: Path,
) -> None:
    async def run() -> None:
        engines = Engines()
        sender, record = decoding(engines, tmp_path, lockstep=False)
        sender.abort(record.attempts[AttemptId(ENGINES * EACH - 1)])
        sender.send()
        assert 0 < engines.submitted() < ENGINES * EACH
        for _ in range(ENGINES):
            await asyncio.sleep(0)
        assert engines.submitted() == ENGINES * EACH - 1
        for told in engines.told.values():
            assert {type(command) for command in told} == {msg.BeginStep, msg.Submit}

    asyncio.run(run())


def test_what_is_aborted_on_its_way_to_another_engine_has_the_tokens_of_the_first(
    tmp_path: Path,
) -> None:
    engines = Engines()
    sender, record = decoding(engines, tmp_path, lockstep=True)
    attempt = record.attempts[AttemptId(0)]
    sender.send()
    target = EngineId(1)
    sender.migrate(do.MigrateAttempts(attempts=(attempt.id,), source=attempt.engine, target=target))
    half = Output(
        attempt=attempt.id,
        tokens=np.arange(3, dtype=np.int32),
        logprobs=np.zeros(3, np.float32),
        finish_reason="abort",
        weights_version=0,
        drafts=Drafted(2, 3, 1),
    )
    sender.take(attempt.engine, msg.Aborted(outputs=[half]))
    sender.abort(attempt)
    assert (attempt.verdict, attempt.tokens, attempt.drafts) == ("aborted", 3, half.drafts)


def test_a_move_to_an_engine_that_dies_meanwhile_ends_where_it_began(tmp_path: Path) -> None:
    """As the policy has it then: it is no failure of the prompt's."""
    engines, posted = Engines(), list[Any]()
    mover, record = decoding(engines, tmp_path, lockstep=True)
    mover._post = posted.append
    mover.send()
    attempt = record.attempts[AttemptId(0)]
    mover.migrate(
        do.MigrateAttempts(attempts=(attempt.id,), source=EngineId(0), target=EngineId(1))
    )
    mover.send()
    engines.engines = (EngineId(0), *engines.engines[2:])
    mover.take(EngineId(0), msg.Aborted(outputs=[output(attempt.id, "abort")]))
    mover.send()
    assert posted == [ev.AttemptMigrated(attempt=attempt.id, engine=EngineId(0), tokens=2)]
    assert engines.told[EngineId(0)][-1].requests[0].attempt == attempt.id


def test_a_token_without_a_probability_ends_the_step(tmp_path: Path) -> None:
    taker, _ = decoding(Engines(), tmp_path, lockstep=True)
    broken = replace(output(AttemptId(0), "stop"), logprobs=np.array([-1.0, np.nan], np.float32))
    with pytest.raises(ValueError, match="step 0: a token of prompt p has no probability"):
        taker.take(EngineId(0), msg.Finished(outputs=[broken]))


def output(attempt: AttemptId, reason: Any) -> Output:
    return Output(
        attempt=attempt,
        tokens=np.zeros(2, np.int32),
        logprobs=np.zeros(2, np.float32),
        finish_reason=reason,
        weights_version=0,
    )


def test_in_lockstep_all_of_it_is_sent_at_once(tmp_path: Path) -> None:
    engines = Engines()
    sender, _ = decoding(engines, tmp_path, lockstep=True)
    sender.send()
    assert engines.submitted() == ENGINES * EACH


def test_whatever_ran_on_a_lost_engine_has_ended_then(tmp_path: Path) -> None:
    """Also what it had been told to stop: the bubble begins with the loss."""
    now = 1.0
    engines = Engines()
    sender, record = decoding(engines, tmp_path, lockstep=True, clock=lambda: now)
    sender.send()
    for each in record.attempts.values():
        if each.engine or each.index % 2:
            sender.abort(each)
    sender.send()
    now = 4.0
    lost = [sender.lose(engine) for engine in engines.engines]
    assert sum(map(len, lost)) == ENGINES * EACH - EACH // 2
    assert {each.end_s for each in record.attempts.values()} == {4.0}
    record.fleet = by_number("colocated", engines.engines, ())
    record.rollout_end_s = record.end_s = 10.0
    assert record.bubble()["rollout"] == pytest.approx(0.7)
