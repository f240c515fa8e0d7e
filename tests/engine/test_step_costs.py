"""What ``measure_steps`` finds of an engine whose costs are known, on its own clock."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import cycle
from typing import Any

import numpy as np
import pytest

from rollpacker.config import FakeEngineConfig
from rollpacker.core.types import AttemptId, EngineId, PromptId
from rollpacker.engine.base import Request, SamplingParams, Speculation
from rollpacker.engine.fake import FakeEngine
from rollpacker.engine.latency import NONE, ON_A_CPU, ON_A_GPU, Contexts, StepTimes, measure_steps
from rollpacker.runtime.messages import messages as msg
from rollpacker.runtime.step.step import StepRecord
from rollpacker.runtime.worker.engine_worker import EngineWorker

STEP_S, SEQUENCE_S, PREFILL_S = 1e-4, 1e-5, 1e-5
SIZES = (1, 4, 16)
WAIT_S = 2e-3
PAUSE_S = 0.1


class Linear(FakeEngine):
    """A step takes ``STEP_S``, and more for each sequence, prefilled token and context token.

    Every third step takes as little as that, others up to half of it longer.
    """

    def __init__(self, context_token_s: float, concurrency: int = 64) -> None:
        super().__init__(FakeEngineConfig(lengths=[1 << 30]), concurrency=concurrency)
        self.now = 0.0
        self._slope = context_token_s
        self._late = cycle([1.5, 1.2, 1.0])

    def step(self):
        """One step, and its time."""
        before = self._prefilled
        outputs = super().step()
        running = self._running()
        contexts = sum(len(one.request.prompt) + len(one.tokens) for one in running)
        prefilled = max(0, self._prefilled - before - len(running))
        took = STEP_S + SEQUENCE_S * len(running) + self._slope * contexts
        self.now += took * next(self._late) + PREFILL_S * prefilled
        return outputs


def measured(engine: Linear, long: Contexts = ON_A_CPU, context: int = 32):
    return measure_steps(engine, SIZES, context, long, clock=lambda: engine.now)


@pytest.mark.parametrize("slope", [2e-8, 1e-7, 3e-7])
@pytest.mark.parametrize("long", [ON_A_CPU, ON_A_GPU])
def test_a_linear_cost_of_contexts_is_found(slope: float, long: Contexts) -> None:
    found = measured(Linear(slope), long)
    assert found.context_token_s == pytest.approx(slope, rel=0.1)
    for size in SIZES:
        assert found.decode[size] == pytest.approx(STEP_S + SEQUENCE_S * size, rel=0.1)
    assert found.prefill_token_s == pytest.approx(PREFILL_S, rel=0.5)


def test_contexts_that_cost_nothing_are_known_to() -> None:
    assert measured(Linear(0.0)).context_token_s == pytest.approx(0.0, abs=1e-12)


def test_no_step_is_all_context() -> None:
    """As a disturbed measurement could say."""
    found = measured(Linear(1e-3))
    assert found.context_token_s is not None
    assert all(seconds > 0.0 for seconds in found.decode.values())


@pytest.mark.parametrize("long", [NONE, Contexts(sequences=4, tokens=1)])
def test_without_room_nothing_is_said(long: Contexts) -> None:
    found = measured(Linear(1e-6), long)
    assert found.context_token_s is None
    assert found.decode.keys() == set(SIZES)


def test_sequences_that_do_not_run_together_say_nothing() -> None:
    engine = Linear(1e-6, concurrency=2)
    assert measured(engine).context_token_s is None
    assert not engine.busy()


def test_steps_do_not_depend_on_times() -> None:
    """Or processes that measure together would part."""
    slow, fast = Linear(1e-3), Linear(0.0)
    measured(slow)
    measured(fast)
    assert slow.stats() == fast.stats()


def test_contexts_are_cut_to_what_fits() -> None:
    assert ON_A_CPU.within(1024, 65536, 64) == ON_A_CPU
    assert ON_A_CPU.within(256, 65536, 64) == Contexts(sequences=4, tokens=128)
    assert ON_A_CPU.within(1024, 1024, 64) == Contexts(sequences=1, tokens=256)
    assert ON_A_CPU.within(1024, 65536, 2).sequences == 2
    assert not ON_A_CPU.within(1024, 64, 64).sequences
    assert not ON_A_CPU.within(9, 65536, 64).sequences


def test_other_work_in_most_of_the_time_does_not_count() -> None:
    times = StepTimes()
    for number in range(200):
        slow = 1.0 if number % 10 == 0 else 3.0
        for rows in (1, 7, 8, 64):
            times.add(rows, slow * (STEP_S + SEQUENCE_S * rows))
    assert times.latency() == {n: pytest.approx(STEP_S + SEQUENCE_S * n) for n in (1, 7, 64)}


def test_of_rows_that_were_seldom_run_nothing_is_said() -> None:
    times = StepTimes()
    for _ in range(7):
        times.add(32, STEP_S)
    assert times.latency() == {}
    times.add(32, STEP_S)
    assert times.latency() == {32: STEP_S}


class OnADevice(FakeEngine):
    """Waits for its steps, and hardly computes itself."""

    def __init__(self) -> None:
        super().__init__(FakeEngineConfig(lengths=[1 << 30]))

    def step(self):
        """One step, of ``WAIT_S`` at least."""
        time.sleep(WAIT_S)
        return super().step()

    def stats(self):
        """A row for each token."""
        stats = super().stats()
        return replace(stats, rows=stats.generated_tokens)


def test_a_wait_for_a_device_is_a_part_of_the_step() -> None:
    found = measure_steps(OnADevice(), SIZES, 32, NONE)
    assert all(seconds >= WAIT_S for seconds in found.decode.values())


def worker() -> tuple[EngineWorker, list[Any]]:
    sent: list[Any] = []
    return EngineWorker(OnADevice(), sent.append), sent


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
    assert all(s.seconds >= WAIT_S * s.tokens for s in work.step_times.values())
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


def test_what_others_took_out_of_the_engine_is_in_no_later_step() -> None:
    """As a run inside another trainer does after a round that failed."""
    one, sent = worker()
    submit(one, 100, 100)
    one.work()
    one._engine.abort([AttemptId(0), AttemptId(1)])
    time.sleep(PAUSE_S)
    one.commands[msg.BeginStep](msg.BeginStep())
    submit(one, 1)
    one.work()
    (sums,) = told(one, sent).step_times.values()
    assert sums.context == pytest.approx(4.5)
    assert sums.seconds < PAUSE_S


def test_a_worker_counts_the_wait_for_a_device() -> None:
    one, sent = worker()
    submit(one, 99)
    for _ in range(8):
        one.work()
    one.commands[msg.Abort](msg.Abort(attempts=[AttemptId(0)]))
    assert told(one, sent).decode_s[1] >= WAIT_S
