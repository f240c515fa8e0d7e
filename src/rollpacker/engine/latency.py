"""What a step takes at several batch sizes, a token of prefill, and a token of context."""

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
    NO_SPECULATION,
    Engine,
    Ints,
    Output,
    Request,
    SamplingParams,
    Speculation,
)

STEPS = 3
SHORT_STEPS = 16
"""Of engines whose steps take less than a millisecond: with three, what a row costs differs by
three from one start to the next, with these by a seventh."""
_PAIR_STEPS = 8
"""Contexts make a small difference between two times: the least of more steps has less noise."""
_MOST = 0.5
"""Share of a measured step that its contexts can take: short ones take far less on any engine
that we know, so more is noise."""


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Wall time of an engine's steps: of one on a GPU, the processor sees hardly anything.

    Args:
        decode: seconds of a decode step by batch size, without what contexts add to it.
        prefill_token_s: seconds for each prefilled token, at least 0.
        context_token_s: seconds that each context token of the batch adds to a decode step, at
            least 0; None where the engine has no room to measure it.
    """

    decode: dict[int, float]
    prefill_token_s: float
    context_token_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Contexts:
    """What is measured beside batches of short contexts: a few long ones.

    Args:
        sequences: how many.
        tokens: of each. All that they are more than the short ones together should take at least
            a few hundredths of a decode step to read.
    """

    sequences: int
    tokens: int

    def within(self, max_length: int, kv_tokens: int, running: int) -> Contexts:
        """What of it fits half of an engine: shorter ones, and fewer."""
        tokens = min(self.tokens, max_length // 2)
        each = tokens + self.sequences + _PAIR_STEPS + 1
        most = min(running, kv_tokens // 2 // each) if each <= max_length else 0
        return Contexts(sequences=min(self.sequences, most), tokens=tokens)


NONE = Contexts(sequences=0, tokens=0)
ON_A_CPU = Contexts(sequences=4, tokens=256)
"""Prefill is slow: 12 ms for 0.2M parameters, two seconds for 135M."""
ON_A_GPU = Contexts(sequences=16, tokens=2048)
"""Of a 7B model these are 2 GB of KV beside 15 GB of weights."""


_KEPT = 64
"""Steps of about as many rows that are remembered."""
_LEAST = 8
"""From which the fastest of them is told."""
_OCTAVE = 2
"""Kinds of steps for each doubling of their rows."""


class StepTimes:
    """What decode steps take while the engine is at work: the fastest of the latest ones.

    Other work on the machine makes a step longer, never shorter.
    """

    def __init__(self) -> None:
        self._latest: defaultdict[int, deque[tuple[int, float]]] = defaultdict(
            lambda: deque(maxlen=_KEPT)
        )

    def add(self, rows: int, seconds: float) -> None:
        """A step ran so many rows (tokens, drafts included), and prefilled nothing."""
        self._latest[round(_OCTAVE * math.log2(rows))].append((rows, seconds))

    def latency(self) -> dict[int, float]:
        """Seconds of a step by rows, where enough were seen."""
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

    Decode steps: the fastest of ``steps``. Prefill: what the first step of a batch takes beyond a
    decode step, over the tokens by which it runs more, the least of all batches. Contexts: the
    difference between as many short and long sequences. The engine must be idle; batch sizes
    above what it can hold are left out. Its counters move. The steps it makes do not depend on
    their times, so processes that measure together stay together.

    Args:
        engine: to measure.
        batch_sizes: numbers of sequences.
        context: tokens of each.
        long: must fit the engine; no sequences where there is no room for any.
        clock: seconds.
        steps: decode steps of each batch.
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
    """Draft and verify once, so that nothing is compiled when it is first of use.

    Args:
        engine: idle; what it learns from here on is for it to forget.
        room: tokens of its longest sequence.
    """
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
    """Seconds of a decode step for each context token; None where that cannot be found."""
    few = Contexts(sequences=long.sequences, tokens=min(short, long.tokens // 2))
    if not few.sequences or not few.tokens:
        return None
    less, more = (_least_s(engine, contexts, clock) for contexts in (few, long))
    if less is None or more is None:
        return None
    return max(0.0, more - less) / (few.sequences * (long.tokens - few.tokens))


def _least_s(engine: Engine, contexts: Contexts, clock: Callable[[], float]) -> float | None:
    """Seconds of a decode step of sequences that share no KV; None if it cannot hold them."""
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
    """One prompt for all, another one for each batch size: no prefix is found in a cache."""
    params = SamplingParams(max_tokens=steps + 2, ignore_stop=True)
    prompt = _prompt(len(ids), context)
    return [
        Request(attempt=a, group=PromptId("latency"), prompt=prompt, params=params, seed=i)
        for i, a in enumerate(ids)
    ]


def _prompt(number: int, tokens: int) -> NDArray[np.int32]:
    """A number's bits: no two begin alike."""
    return np.array([number >> i & 1 for i in range(tokens)], np.int32)


def _timed(engine: Engine, clock: Callable[[], float]) -> float:
    """Seconds of a step."""
    start = clock()
    engine.step()
    return clock() - start


# --- probe: What an engine answers to a few fixed requests, to compare: with drafts, after a
# sleep.

_PROMPTS, _PROMPT_TOKENS, _TOKENS = 4, 12, 32
_WRONG_AT = 9
"""The token of each hint that is not the response's: drafts are right up to it."""
_DRAFTS = Speculation(below=_PROMPTS, most=6, free=1 << 20)
_EXACT, _LOOSE, _LOOSE_MEAN = 1e-3, 0.25, 0.03
"""Nats by which log-probabilities of one token may differ: in float32; in bfloat16, where steps of
other shapes round otherwise, at most and on average."""


def answers(engine: Engine, hints: Sequence[Output] = ()) -> list[Output]:
    """Responses to fixed prompts with fixed seeds, in order; the engine is idle and has weights.

    ``hints``: earlier answers, from which drafts are taken where the engine decodes ahead.
    """
    params = SamplingParams(max_tokens=_TOKENS, ignore_stop=True)
    engine.submit(
        [
            Request(
                attempt=AttemptId(-1 - n),
                group=PromptId(f"probe {n}"),
                prompt=prompt(n),
                params=params,
                seed=n,
                hints=[_altered(hints[n])] if hints else (),
            )
            for n in range(_PROMPTS)
        ]
    )
    found: list[Output] = []
    while engine.busy():
        found += engine.step()
    return sorted(found, key=lambda output: -output.attempt)


def prompt(number: int) -> Ints:
    """Token ids of one of the requests."""
    return np.arange(1 + number, 1 + number + _PROMPT_TOKENS, dtype=np.int32)


def _altered(output: Output) -> Ints:
    tokens = output.tokens.copy()
    tokens[_WRONG_AT] = 0 if tokens[_WRONG_AT] else 1
    return tokens


def drafts_differ(engine: Engine, *, loose: bool) -> str:
    """How the engine's answers with drafts differ from those without; empty where they do not.

    Args:
        engine: decodes ahead, is idle and has weights.
        loose: it computes in bfloat16: then tokens may differ from where two are about as likely.
    """
    plain = answers(engine)
    engine.speculate(_DRAFTS)
    drafted = answers(engine, plain)
    engine.speculate(NO_SPECULATION)
    if not sum(output.drafts.accepted for output in drafted):
        return "no draft was right, though each was the response itself"
    return differ(plain, drafted, loose=loose)


def differ(before: Sequence[Output], after: Sequence[Output], *, loose: bool) -> str:
    """How answers to the same requests differ; empty where they do not but for rounding."""
    gaps: list[float] = []
    for one, other in zip(before, after, strict=True):
        unlike = np.flatnonzero(one.tokens != other.tokens)
        same = int(unlike[0]) if unlike.size else len(one.tokens)
        if unlike.size and not loose:
            return f"token {same} of a response is {other.tokens[same]}, not {one.tokens[same]}"
        gaps += np.abs(one.logprobs[:same] - other.logprobs[:same]).tolist()
    if len(gaps) < sum(len(one.tokens) for one in before) / 2:
        return "most tokens of the responses are others"
    if max(gaps) > (_LOOSE if loose else _EXACT):
        return f"the log-probability of a token differs by {max(gaps):.3f} nats"
    if sum(gaps) / len(gaps) > _LOOSE_MEAN:
        return f"log-probabilities differ by {sum(gaps) / len(gaps):.3f} nats on average"
    return ""
