"""Compares an engine's answers to a few fixed requests: with drafts, or after a sleep."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

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

_PROMPTS, _PROMPT_TOKENS, _TOKENS = 4, 12, 32
_WRONG_AT = 9  # The token of each hint that differs from the response. Drafts are right up to it.
_DRAFTS = Speculation(below=_PROMPTS, most=6, free=1 << 20)
_EXACT, _LOOSE, _LOOSE_MEAN = 1e-3, 0.25, 0.03
"""Nats by which logprobs of a token may differ: in float32, in bfloat16 at most and on average."""


def answers(engine: Engine, hints: Sequence[Output] = ()) -> list[Output]:
    """Responses to fixed prompts with fixed seeds, in order. The engine is idle and has weights.
    ``hints`` are earlier answers, from which an engine that decodes ahead takes drafts."""
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
    """How the engine's answers with drafts differ from those without. Empty if they agree.

    Args:
        engine: decodes ahead, is idle and has weights.
        loose: it computes in bfloat16, so tokens may differ from a near tie on.
    """
    plain = answers(engine)
    engine.speculate(_DRAFTS)
    drafted = answers(engine, plain)
    engine.speculate(NO_SPECULATION)
    if not sum(output.drafts.accepted for output in drafted):
        return "no draft was accepted, though each was the response itself"
    return differ(plain, drafted, loose=loose)


def differ(before: Sequence[Output], after: Sequence[Output], *, loose: bool) -> str:
    """How answers to the same requests differ. Empty if they agree up to rounding."""
    gaps: list[float] = []
    for one, other in zip(before, after, strict=True):
        unlike = np.flatnonzero(one.tokens != other.tokens)
        same = int(unlike[0]) if unlike.size else len(one.tokens)
        if unlike.size and not loose:
            return f"token {same} of a response is {other.tokens[same]}, not {one.tokens[same]}"
        gaps += np.abs(one.logprobs[:same] - other.logprobs[:same]).tolist()
    if len(gaps) < sum(len(one.tokens) for one in before) / 2:
        return "most tokens of the responses differ"
    if max(gaps) > (_LOOSE if loose else _EXACT):
        return f"the log-probability of a token differs by {max(gaps):.3f} nats"
    if sum(gaps) / len(gaps) > _LOOSE_MEAN:
        return f"log-probabilities differ by {sum(gaps) / len(gaps):.3f} nats on average"
    return ""
