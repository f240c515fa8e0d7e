"""Measures decode steps at several batch sizes, and the cost of a token of prefill and of
context."""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from rollpacker.core.types import AttemptId, PromptId
from rollpacker.engine.base import (
    Engine,
    Request,
    SamplingParams,
    Speculation,
)

STEPS = 3
SHORT_STEPS = 16
"""For engines whose steps take less than a millisecond. With three steps, the cost of a row varies
threefold between starts, with these by a seventh."""
_PAIR_STEPS = 8
"""Contexts make a small difference between two times, so the minimum of more steps has less
noise."""
_MOST = 0.5  # Largest share of a measured step that its short contexts can take. More is noise.


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Wall time of an engine's steps, as processor time would miss work on a GPU.

    ``decode`` is seconds by batch size, without the share of contexts. The others are seconds per
    token of prefill, and per context token of a decode step (None without room to measure).
    """

    decode: dict[int, float]
    prefill_token_s: float
    context_token_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Contexts:
    """A few long contexts, measured beside batches of short ones. Reading their extra tokens should
    take at least a few hundredths of a decode step."""

    sequences: int
    tokens: int

    def within(self, max_length: int, kv_tokens: int, running: int) -> Contexts:
        """The part that fits half of an engine: shorter contexts, and fewer."""
        tokens = min(self.tokens, max_length // 2)
        each = tokens + self.sequences + _PAIR_STEPS + 1
        most = min(running, kv_tokens // 2 // each) if each <= max_length else 0
        return Contexts(sequences=min(self.sequences, most), tokens=tokens)


NONE = Contexts(sequences=0, tokens=0)
ON_A_CPU = Contexts(sequences=4, tokens=256)
"""Prefill is slow: 12 ms for 0.2M parameters, two seconds for 135M."""
ON_A_GPU = Contexts(sequences=16, tokens=2048)
"""For a 7B model these are 2 GB of KV beside 15 GB of weights."""


_KEPT = 64  # remembered steps of one kind
_LEAST = 8  # steps before the fastest is reported
_OCTAVE = 2  # kinds of steps for each doubling of their rows


class StepTimes:
    """The fastest of the latest decode steps, as other work on the machine only makes a step
    longer."""

    def __init__(self) -> None:
        self._latest: defaultdict[int, deque[tuple[int, float]]] = defaultdict(
            lambda: deque(maxlen=_KEPT)
        )

    def add(self, rows: int, seconds: float) -> None:
        self._latest[round(_OCTAVE * math.log2(rows))].append((rows, seconds))

    def latency(self) -> dict[int, float]:
        found: dict[int, float] = {}
        for steps in self._latest.values():
            if len(steps) >= _LEAST:
                rows, seconds = min(steps, key=itemgetter(1))
                found[rows] = seconds
        return found


def measure_steps(
    engine: Engine,
    batch_sizes: Sequence[int],
    context: int,
    long: Contexts,
    clock: Callable[[], float] = time.perf_counter,
    steps: int = STEPS,
) -> StepCosts:
    """Time steps with each number of sequences of ``context`` tokens, and with ``long`` ones.

    A decode step is the fastest of ``steps``. Prefill is the extra time of a batch's first step per
    extra token. Contexts are the difference between equal numbers of short and long sequences.
    Batch sizes above the engine's capacity are left out.

    The engine must be idle, and its counters move. The steps do not depend on their times, so
    processes that measure together stay together.
    """
    assert not engine.busy()
    decode: dict[int, float] = {}
    prefill: list[float] = []
    for size in batch_sizes:
        ids = [AttemptId(-1 - i) for i in range(size)]
        before = engine.stats().prefill_tokens
        engine.submit(_requests(ids, context, steps))
        first, *times = (_timed(engine, clock) for _ in range(1 + steps))
        if engine.stats().running == size:
            decode[size] = min(times)
            more = engine.stats().prefill_tokens - before - size
            if more >= size:
                prefill.append((first - decode[size]) / more)
        engine.abort(ids)
    slope = _context_token_s(engine, min(32, context), long, clock)
    if slope is not None:
        slope = min(slope, *(_MOST * t / (size * context) for size, t in decode.items()))
        decode = {size: t - slope * size * context for size, t in decode.items()}
    return StepCosts(decode, max(0.0, min(prefill, default=0.0)), slope)


def decode_ahead(engine: Engine, room: int) -> None:
    """Draft and verify once, so that later drafts compile nothing. The engine is idle, has room for
    sequences of ``room`` tokens, and should forget the texts afterwards."""
    half = min(8, room // 2)
    params = SamplingParams(max_tokens=half, temperature=0.0, ignore_stop=True)
    prompt, group = np.zeros(half, np.int32), PromptId("drafts")
    sequences = [AttemptId(-1), AttemptId(-2)]
    engine.submit(
        [Request(attempt=a, group=group, prompt=prompt, params=params, seed=0) for a in sequences]
    )
    engine.speculate(Speculation(below=len(sequences), most=4))
    while engine.busy():
        engine.step()


def _context_token_s(
    engine: Engine, short: int, long: Contexts, clock: Callable[[], float]
) -> float | None:
    few = Contexts(sequences=long.sequences, tokens=min(short, long.tokens // 2))
    if not few.sequences or not few.tokens:
        return None
    less, more = (_least_s(engine, contexts, clock) for contexts in (few, long))
    if less is None or more is None:
        return None
    return max(0.0, more - less) / (few.sequences * (long.tokens - few.tokens))


def _least_s(engine: Engine, contexts: Contexts, clock: Callable[[], float]) -> float | None:
    ids = [AttemptId(-1 - i) for i in range(contexts.sequences)]
    params = SamplingParams(max_tokens=len(ids) + _PAIR_STEPS + 1, ignore_stop=True)
    engine.submit(
        [
            Request(
                attempt=attempt,
                group=PromptId(f"context {attempt}"),
                prompt=_prompt(i + 1, contexts.tokens),
                params=params,
                seed=i,
            )
            for i, attempt in enumerate(ids)
        ]
    )
    for _ in ids:  # prefill in parts, at least a sequence in each
        engine.step()
    before = engine.stats().prefill_tokens
    seconds = min(_timed(engine, clock) for _ in range(_PAIR_STEPS))
    after = engine.stats()
    engine.abort(ids)
    held = after.running == len(ids) and after.prefill_tokens == before
    return seconds if held else None


def _requests(ids: Sequence[AttemptId], context: int, steps: int) -> list[Request]:
    params = SamplingParams(max_tokens=steps + 2, ignore_stop=True)
    prompt = _prompt(len(ids), context)
    return [
        Request(attempt=a, group=PromptId("latency"), prompt=prompt, params=params, seed=i)
        for i, a in enumerate(ids)
    ]


def _prompt(number: int, tokens: int) -> NDArray[np.int32]:
    # The number's bits, so that no two prompts begin alike and no cache has a prefix.
    return np.array([number >> i & 1 for i in range(tokens)], np.int32)


def _timed(engine: Engine, clock: Callable[[], float]) -> float:
    start = clock()
    engine.step()
    return clock() - start
