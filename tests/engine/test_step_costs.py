"""What ``measure_steps`` finds of an engine whose costs are known, on its own clock."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import cycle
from typing import Any

import numpy as np
import pytest

from rollpacker.config import FakeEngineConfig
from rollpacker.core.types import AttemptId, PromptId
from rollpacker.engine.base import Request, SamplingParams
from rollpacker.engine.fake import FakeEngine
from rollpacker.engine.latency import NONE, ON_A_CPU, ON_A_GPU, Contexts, StepTimes, measure_steps
from rollpacker.runtime.messages import messages as msg
from rollpacker.runtime.worker.engine_worker import EngineWorker

STEP_S, SEQUENCE_S, PREFILL_S = 1e-4, 1e-5, 1e-5
SIZES = (1, 4, 16)
WAIT_S = 2e-3


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


def test_a_worker_counts_the_wait_for_a_device() -> None:
    sent: list[Any] = []
    worker = EngineWorker(OnADevice(), sent.append)
    params = SamplingParams(max_tokens=99)
    asked = Request(
        attempt=AttemptId(0),
        group=PromptId("p"),
        prompt=np.zeros(4, np.int32),
        params=params,
        seed=0,
    )
    worker.commands[msg.Submit](msg.Submit(requests=[asked]))
    for _ in range(8):
        worker.work()
    worker.commands[msg.Abort](msg.Abort(attempts=[AttemptId(0)]))
    worker.commands[msg.LoadWeights](msg.LoadWeights(version=1))
    assert sent[-1].work.decode_s[1] >= WAIT_S
