"""What a step takes at several batch sizes, and a token of prefill."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rollpacker.core.types import AttemptId, PromptId
from rollpacker.engine.base import Engine, Request, SamplingParams

_STEPS = 3


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Process time of an engine's steps.

    Args:
        decode: seconds of a decode step by batch size.
        prefill_token_s: seconds for each prefilled token, at least 0.
    """

    decode: dict[int, float]
    prefill_token_s: float


def measure_steps(engine: Engine, batch_sizes: Sequence[int], context: int) -> StepCosts:
    """Time steps with each number of sequences of ``context`` tokens.

    Decode steps: the fastest of three. Prefill: what the first step of a batch takes beyond a
    decode step, over the tokens by which it runs more, the least of all batches. The engine must
    be idle; batch sizes above what it can hold are left out. Its counters move. The steps it
    makes do not depend on their times, so processes that measure together stay together.
    """
    assert not engine.busy()
    decode: dict[int, float] = {}
    prefill: list[float] = []
    for size in batch_sizes:
        ids = [AttemptId(-1 - i) for i in range(size)]
        before = engine.stats().prefill_tokens
        engine.submit(_requests(ids, context))
        first, *times = (_timed(engine) for _ in range(1 + _STEPS))
        if engine.stats().running == size:
            decode[size] = min(times)
            more = engine.stats().prefill_tokens - before - size
            if more >= size:
                prefill.append((first - decode[size]) / more)
        engine.abort(ids)
    return StepCosts(decode, max(0.0, min(prefill, default=0.0)))


def _requests(ids: Sequence[AttemptId], context: int) -> list[Request]:
    """One prompt for all, another one for each batch size: no prefix is found in a cache."""
    prompt = np.array([len(ids) >> i & 1 for i in range(context)], np.int32)
    params = SamplingParams(max_tokens=_STEPS + 2, ignore_stop=True)
    return [
        Request(attempt=a, group=PromptId("latency"), prompt=prompt, params=params, seed=i)
        for i, a in enumerate(ids)
    ]


def _timed(engine: Engine) -> float:
    """Seconds of a step."""
    start = time.process_time()
    engine.step()
    return time.process_time() - start
