"""What a worker adds up of its engine's decode steps, for ``rollpacker calibrate``."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from rollpacker.config import FakeEngineConfig
from rollpacker.core.types import AttemptId, EngineId, PromptId
from rollpacker.engine.base import Request, SamplingParams, Speculation
from rollpacker.engine.fake import FakeEngine
from rollpacker.runtime.messages import messages as msg
from rollpacker.runtime.step.step import StepRecord
from rollpacker.runtime.worker.engine_worker import EngineWorker

STEP_S, PAUSE_S = 2e-3, 0.1


class Slow(FakeEngine):
    def step(self):
        """One step, of ``STEP_S`` at least."""
        time.sleep(STEP_S)
        return super().step()


def worker() -> tuple[EngineWorker, list[Any]]:
    sent: list[Any] = []
    return EngineWorker(Slow(FakeEngineConfig(lengths=[1 << 30])), sent.append), sent


def submit(one: EngineWorker, *lengths: int) -> None:
    """A response of each length to a prompt of four tokens."""
    requests = [
        Request(
            attempt=AttemptId(number),
            group=PromptId("p"),
            prompt=np.zeros(4, np.int32),
            params=SamplingParams(max_tokens=length),
            seed=number,
        )
        for number, length in enumerate(lengths)
    ]
    one.commands[msg.Submit](msg.Submit(requests=requests))


def told(one: EngineWorker, sent: list[Any]) -> msg.Work:
    one.commands[msg.LoadWeights](msg.LoadWeights(version=1))
    return sent[-1].work


def test_steps_are_added_up_by_how_many_sequences_they_decode() -> None:
    one, sent = worker()
    one.commands[msg.BeginStep](msg.BeginStep())
    time.sleep(PAUSE_S)
    submit(one, 3, 5, 8)
    one.commands[msg.DecodeAhead](msg.DecodeAhead(how=Speculation(below=1)))
    while one.busy():
        one.work()
    work = told(one, sent)
    counts = {
        kind: (sums.tokens, sums.sequences, sums.prefill_tokens, sums.ended)
        for kind, sums in work.step_times.items()
    }
    assert counts == {
        (False, True, 2): (1, 3, 12, 0),
        (False, False, 2): (2, 6, 0, 1),
        (False, False, 1): (2, 4, 0, 1),
        (True, False, 0): (3, 3, 0, 1),
    }
    # It had a prompt of 4 tokens and 5 of its own, and got one in each step.
    assert work.step_times[True, False, 0].context == pytest.approx(9.5 + 10.5 + 11.5)
    assert all(s.seconds >= STEP_S * s.tokens for s in work.step_times.values())
    assert work.start_s >= PAUSE_S
    record = StepRecord(step=0, start_s=0.0, work={EngineId(n): work for n in range(2)})
    rows = record.step_times()
    assert [row[0] for row in rows] == sorted(row[0] for row in rows)
    assert sum(row[1] for row in rows) == 2 * 8


def test_time_without_work_is_in_no_step() -> None:
    one, sent = worker()
    submit(one, 100)
    one.work()
    one.commands[msg.Abort](msg.Abort(attempts=[AttemptId(0)]))
    time.sleep(PAUSE_S)
    submit(one, 100)
    one.work()
    one.commands[msg.Abort](msg.Abort(attempts=[AttemptId(0)]))
    assert sum(sums.seconds for sums in told(one, sent).step_times.values()) < PAUSE_S
    one.commands[msg.BeginStep](msg.BeginStep())
    submit(one, 1)
    one.work()
    (sums,) = told(one, sent).step_times.values()
    assert sums.context == pytest.approx(4.5)  # what was aborted is forgotten
