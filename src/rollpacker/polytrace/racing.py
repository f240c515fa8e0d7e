"""Estimate of tail batching's gain and bias by order statistics of lengths.

Rewards, prefill and admission are left out: every attempt decodes from the start of its round.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollpacker.core.groups import over_provision
from rollpacker.polytrace.layout import Layout
from rollpacker.polytrace.lengths import Lengths

Floats = NDArray[np.float64]

_MOST_SAMPLED = 2_000_000
_ROUNDS = (20, 200)


@dataclass(frozen=True, slots=True, kw_only=True)
class RaceEstimate:
    """Racing against synchronous rounds, for the same number of trained prompts.

    Args:
        speedup_steps: ratio of decode steps.
        speedup: ratio of rollout seconds under the layout.
        kept_vs_true_len: mean length of the kept responses over that of all.
        decoded_vs_kept: tokens decoded, aborted ones too, over tokens kept.
        deferred_share: share of the prompts trained that come from a long round.
    """

    speedup_steps: float
    speedup: float
    kept_vs_true_len: float
    decoded_vs_kept: float
    deferred_share: float


@dataclass(frozen=True, slots=True)
class _Rounds:
    """Per round: decode steps, tokens decoded, tokens kept."""

    steps: Floats
    decoded: Floats
    kept: Floats


def estimate_race(
    lengths: Lengths,
    *,
    prompts: int,
    responses: int,
    eta_prompts: float = 1.25,
    eta_responses: float = 1.25,
    layout: Layout | None = None,
    seed: int = 0,
) -> RaceEstimate:
    """Race rounds of ``prompts`` x ``responses`` drawn from a length model.

    A short round starts ``ceil(eta_prompts * prompts)`` prompts with ``ceil(eta_responses *
    responses)`` attempts each and ends when ``prompts`` of them have ``responses`` finished; the
    others are run again, with fresh attempts, in long rounds of ``prompts``.
    """
    rng = np.random.default_rng(seed)
    started = (over_provision(prompts, eta_prompts), over_provision(responses, eta_responses))
    rounds = int(np.clip(_MOST_SAMPLED // (started[0] * started[1]), *_ROUNDS))
    traits = lengths.traits(rng, rounds * started[0])
    drawn = lengths.given(rng, traits, started[1]).reshape(rounds, *started)
    short, lost = _short_rounds(np.sort(drawn.astype(np.float64), axis=2), prompts, responses)
    full = _full_rounds(lengths, rng, lengths.traits(rng, rounds * prompts), prompts, responses)
    later = started[0] / prompts - 1.0
    if later > 0.0:
        losers = traits.reshape(rounds, started[0], -1)[lost]
        long = _full_rounds(lengths, rng, losers, prompts, responses)
    else:
        long = full
    return _compared(full, short, long, later, prompts * responses, layout or Layout())


def _short_rounds(
    ordered: Floats, prompts: int, responses: int
) -> tuple[_Rounds, NDArray[np.bool_]]:
    """Rounds and, shape (rounds, started prompts), who lost; ``ordered``: shortest first."""
    done = ordered[:, :, responses - 1]
    rank = done.argsort(axis=1, kind="stable").argsort(axis=1, kind="stable")
    won = rank < prompts
    end = np.where(won, done, 0.0).max(axis=1)
    stop = np.minimum(done, end[:, None])
    decoded = np.minimum(ordered, stop[:, :, None]).sum(axis=(1, 2))
    kept = np.where(won, ordered[:, :, :responses].sum(axis=2), 0.0).sum(axis=1)
    return _Rounds(end, decoded, kept), ~won


def _full_rounds(
    lengths: Lengths, rng: np.random.Generator, traits: Floats, prompts: int, responses: int
) -> _Rounds:
    """Unraced rounds of these prompts, in order; a last one may be short of prompts."""
    tokens = lengths.given(rng, traits, responses).astype(np.float64)
    whole = max(1, traits.shape[0] // prompts)
    tokens = tokens[: whole * prompts]
    starts: NDArray[np.int64] = prompts * np.arange(whole)
    steps = np.maximum.reduceat(tokens.max(axis=1), starts)
    total = np.add.reduceat(tokens.sum(axis=1), starts)
    return _Rounds(steps, total, total)


def _compared(
    full: _Rounds, short: _Rounds, long: _Rounds, later: float, kept: int, layout: Layout
) -> RaceEstimate:
    """``later``: long rounds per short one; ``kept``: responses kept by every round."""

    def seconds(rounds: _Rounds) -> float:
        fair = rounds.decoded / layout.workers
        steps = np.maximum(rounds.steps, fair / layout.slots)
        return float((layout.base_s * steps + layout.per_sequence_s * fair).mean())

    def raced(a: float, b: float) -> float:
        return (a + later * b) / (1.0 + later)

    true_len = float(full.kept.mean()) / kept
    kept_len = raced(float(short.kept.mean()), float(long.kept.mean())) / kept
    steps = raced(float(short.steps.mean()), float(long.steps.mean()))
    decoded = raced(float(short.decoded.mean()), float(long.decoded.mean())) / kept
    return RaceEstimate(
        speedup_steps=float(full.steps.mean()) / steps,
        speedup=seconds(full) / raced(seconds(short), seconds(long)),
        kept_vs_true_len=kept_len / true_len,
        decoded_vs_kept=decoded / kept_len,
        deferred_share=later / (1.0 + later),
    )
