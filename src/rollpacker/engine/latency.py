"""How long a decode step takes at several batch sizes."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from rollpacker.core.types import AttemptId, PromptId
from rollpacker.engine.base import Engine, Request, SamplingParams

_STEPS = 3


def measure_latency(engine: Engine, batch_sizes: Sequence[int], context: int) -> dict[int, float]:
    """Seconds per decode step with each number of sequences of ``context`` tokens.

    The fastest of three steps, in process time. The engine must be idle; batch sizes above what
    it can hold are left out. Its counters move.
    """
    assert not engine.busy()
    measured: dict[int, float] = {}
    params = SamplingParams(max_tokens=_STEPS + 2, ignore_stop=True)
    prompt = np.zeros(context, np.int32)
    for size in batch_sizes:
        ids = [AttemptId(-1 - i) for i in range(size)]
        engine.submit(
            [
                Request(attempt=a, group=PromptId("latency"), prompt=prompt, params=params, seed=i)
                for i, a in enumerate(ids)
            ]
        )
        engine.step()
        times: list[float] = []
        for _ in range(_STEPS):
            start = time.process_time()
            engine.step()
            times.append(time.process_time() - start)
        if engine.stats().running == size:
            measured[size] = min(times)
        engine.abort(ids)
    return measured
