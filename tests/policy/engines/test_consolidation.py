"""The tail moves when that ends the step sooner, to larger groups where latency binds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from test_scaling import Roofline, attempts, consolidation, curve, fleet, observe

from rollpacker.core.types import AttemptId
from rollpacker.policy.engines.scaling import ActiveAttempt
from rollpacker.policy.lengths import KaplanMeier

LONG = curve([int(x) for x in np.exp(np.random.default_rng(1).normal(8.0, 1.0, 4000))])


class Flat(Roofline):
    """A step takes 10 ms for any number of sequences, and ``token_s`` for each context token."""

    def __init__(self, token_s: float) -> None:
        self._token_s = token_s

    def kv_tokens(self, tp: int) -> float:
        return 1e6

    def step_seconds(self, tp: int, batch: int, tokens: float) -> float:
        return 0.01 + self._token_s * tokens


def moved(policy, where, active, work=0, now=0.0):
    policy.begin(where, LONG)
    return observe(policy, 0.5, active, work, now)


def test_a_short_tail_of_a_large_model_runs_as_one_group_of_a_node():
    where = fleet(64, 4, 32)
    made = moved(consolidation(sizes=(2, 4, 8)), where, attempts(32, where, generated=4000))
    assert made is not None
    assert made.tp == 8
    assert all(len(members) == 2 for members in made.groups.values())
    assert len(made.moves) == 32


def test_waiting_gradients_free_whole_training_replicas_at_the_same_size():
    where = fleet(16, 4, 8)
    active = attempts(8, where, generated=4000)
    rules = {"sizes": (4,), "train_seconds_per_token": 1e-2}
    assert moved(consolidation(**rules), where, active) is None
    made = moved(consolidation(**rules), where, active, work=500_000)
    assert made is not None
    assert made.groups == {}
    freed = [device for engine in made.freed for device in where.engines[engine]]
    free = where.trainable(where.devices - set(freed))
    assert [d for each in free for d in where.replicas[each]] == sorted(freed)
    assert len(freed) == 8


def test_the_dearer_contexts_are_the_fewer_devices_a_tail_leaves():
    """Where steps take as long for many as for few, only what contexts add speaks against it."""
    where = fleet(4, 1, 1)
    active = attempts(16, where, generated=8000)

    def freed(token_s: float, work: int = 500_000) -> int:
        policy = consolidation(Flat(token_s), sizes=(1,), train_seconds_per_token=1e-3)
        made = moved(policy, where, active, work)
        return 0 if made is None else len(made.freed)

    assert freed(0.0) > freed(1e-6) > freed(1e-5) == 0
    assert freed(0.0, work=10) == 0


def test_devices_of_a_lost_replica_are_not_freed_for_it():
    where = fleet(2, 1, 1)
    active = attempts(4, where, generated=400)
    rules = {"sizes": (1,), "train_seconds_per_token": 1e-2}
    policy = consolidation(Flat(0.0), **rules)
    assert moved(policy, where, active, work=20_000) is not None
    policy.begin(where, LONG)
    policy.lose_replicas(tuple(where.replicas))
    assert observe(policy, 0.5, active, 20_000, 0.0) is None


def test_nothing_moves_above_the_threshold_or_without_lengths():
    where = fleet(64, 4, 32)
    assert moved(consolidation(below=64), where, attempts(65, where)) is None
    policy = consolidation()
    policy.begin(where, None)
    assert observe(policy, 0.9, attempts(8, where), 10**6, 0.0) is None


def test_a_group_that_cannot_hold_the_tail_is_not_chosen():
    class Tight(Roofline):
        def kv_tokens(self, tp: int) -> float:
            return 1000.0

    where = fleet(64, 4, 32)
    active = attempts(32, where, generated=4000)
    assert moved(consolidation(Tight(), sizes=(4, 8)), where, active) is None
    assert moved(consolidation(Roofline(), sizes=(4, 8)), where, active) is not None


def test_a_second_move_waits_for_the_first():
    where = fleet(64, 4, 8)
    rules = {"sizes": (4, 8), "train_seconds_per_token": 1e-2}
    first = consolidation(**rules)
    active = attempts(64, where, generated=4000)
    made = moved(first, where, active)
    assert made is not None
    assert len(made.groups) > 1
    bound = [replace(one, engine=made.moves[one.attempt]) for one in active]
    left = list({one.engine: one for one in bound}.values())
    assert observe(first, 0.9, left, 5_000_000, 1.0) is None
    again = observe(first, 0.9, left, 5_000_000, 1000.0)
    assert again is not None
    after = {one.attempt: again.moves.get(one.attempt, made.moves[one.attempt]) for one in left}
    members = {engine for group in made.groups.values() for engine in group}
    assert not set(after.values()) & set(again.freed)
    assert set(after.values()) <= members - set(again.freed)


@pytest.mark.parametrize("amplitude", [0.0, 0.02])
def test_noise_in_the_costs_below_the_margin_moves_nothing_back_and_forth(amplitude):
    """All sizes equally fast and moving free: only noise speaks for a move."""

    class Flat:
        rng = np.random.default_rng(3)

        def kv_tokens(self, tp: int) -> float:
            return 1e9

        def prefill_seconds(self, tp: int, tokens: int) -> float:
            return 0.0

        def decode_seconds(self, tp: int, contexts, remaining) -> float:
            return float(remaining.max()) * (1.0 + amplitude * self.rng.uniform(-1.0, 1.0))

    policy = consolidation(Flat(), recheck=1.0)
    where = fleet(8, 1, 1)
    policy.begin(where, LONG)
    active = attempts(100, where)
    made = [observe(policy, 0.5, active, 0, float(now)) for now in range(50)]
    assert made == [None] * 50


def long_round(below: int, seed: int, where, true: KaplanMeier) -> float:
    """Seconds of a long round's tail from 256 attempts on, decoded group by group."""
    cost, rng = Roofline(), np.random.default_rng(seed)
    policy = consolidation(sizes=(2, 4, 8), below=below)
    policy.begin(where, LONG)
    engines = sorted(where.engines)
    total = true.quantile(rng.uniform(size=256)).tolist()
    active = {
        AttemptId(n): ActiveAttempt(
            attempt=AttemptId(n), prompt_tokens=500, generated=0, engine=engines[n % len(engines)]
        )
        for n in range(256)
    }
    tp, now, ready = where.tp, 0.0, dict.fromkeys(engines, 0.0)
    while active:
        groups = {}
        for one in active.values():
            groups.setdefault(one.engine, []).append(one)
        now += 2.0
        for engine, mine in groups.items():
            span = min(2.0, max(0.0, now - ready.get(engine, 0.0)))
            each = cost.step_seconds(tp, len(mine), sum(one.context for one in mine))
            for one in mine:
                generated = one.generated + round(span / each)
                if generated >= total[one.attempt]:
                    del active[one.attempt]
                else:
                    active[one.attempt] = replace(one, generated=generated)
        made = observe(policy, 1 - len(active) / 256, list(active.values()), 0, now)
        if made is not None:
            tp = made.tp
            for engine in set(made.moves.values()):
                tokens = [active[a].context for a, w in made.moves.items() if w == engine]
                ready[engine] = now + cost.prefill_seconds(tp, sum(tokens))
            for attempt, engine in made.moves.items():
                active[attempt] = replace(active[attempt], engine=engine)
    return now


def test_a_threshold_of_64_is_nearly_as_good_as_larger_ones_and_4_is_too_late():
    where = fleet(64, 4, 32)
    capped = np.minimum(LONG.quantile(np.linspace(0.0, 1.0, 2000)), 32_768)
    true = curve(capped)
    mean = {
        below: np.mean([long_round(below, seed, where, true) for seed in range(3)])
        for below in (0, 4, 64, 256)
    }
    assert mean[64] < 0.9 * mean[0]
    assert mean[64] == pytest.approx(mean[256], rel=0.05)
    assert mean[4] > 1.05 * mean[64]
