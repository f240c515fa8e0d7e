"""The tail moves when that ends the step sooner, to larger groups where latency binds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from test_scaling import Roofline, attempts, consolidation, curve, fleet, observe

LONG = curve([int(x) for x in np.exp(np.random.default_rng(1).normal(8.0, 1.0, 4000))])


class Flat(Roofline):
    """A step takes 10 ms for any number of sequences, and ``token_s`` for each context token."""

    kv_tokens = 1e6

    def __init__(self, tp: int, token_s: float = 0.0) -> None:
        super().__init__(tp)
        self._token_s = token_s

    def step_seconds(self, batch: int, tokens: float) -> float:
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
    rules = {"sizes": (4,), "train_token_s": 1e-2}
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
        policy = consolidation(lambda tp: Flat(tp, token_s), sizes=(1,), train_token_s=1e-3)
        made = moved(policy, where, active, work)
        return 0 if made is None else len(made.freed)

    assert freed(0.0) > freed(1e-6) > freed(1e-5) == 0
    assert freed(0.0, work=10) == 0


def test_devices_of_a_lost_replica_are_not_freed_for_it():
    where = fleet(2, 1, 1)
    active = attempts(4, where, generated=400)
    policy = consolidation(Flat, sizes=(1,), train_token_s=1e-2)
    assert moved(policy, where, active, work=20_000) is not None
    policy.begin(where, LONG)
    policy.lose_replicas(tuple(where.replicas))
    assert observe(policy, 0.5, active, 20_000, 0.0) is None


def test_nothing_moves_above_the_threshold_or_without_lengths():
    where = fleet(64, 4, 32)
    assert moved(consolidation(), where, attempts(129, where, generated=4000)) is None
    assert moved(consolidation(), where, attempts(64, where, generated=4000)) is not None
    policy = consolidation()
    policy.begin(where, None)
    assert observe(policy, 0.9, attempts(8, where), 10**6, 0.0) is None


def test_a_group_that_cannot_hold_the_tail_is_not_chosen():
    class Tight(Roofline):
        kv_tokens = 1000.0

    where = fleet(64, 4, 32)
    active = attempts(32, where, generated=4000)
    assert moved(consolidation(Tight, sizes=(4, 8)), where, active) is None
    assert moved(consolidation(Roofline, sizes=(4, 8)), where, active) is not None


def test_a_second_move_waits_for_the_first():
    where = fleet(64, 4, 8)
    first = consolidation(sizes=(4, 8), train_token_s=1e-2)
    active = attempts(64, where, generated=4000)
    made = moved(first, where, active)
    assert made is not None
    assert len(made.groups) > 1
    bound = [replace(one, engine=made.moves[one.attempt]) for one in active]
    left = list({one.engine: one for one in bound}.values())
    assert observe(first, 0.9, left, 5_000_000, 0.4) is None
    again = observe(first, 0.9, left, 5_000_000, 1000.0)
    assert again is not None
    after = {one.attempt: again.moves.get(one.attempt, made.moves[one.attempt]) for one in left}
    members = {engine for group in made.groups.values() for engine in group}
    assert not set(after.values()) & set(again.freed)
    assert set(after.values()) <= members - set(again.freed)


@pytest.mark.parametrize("amplitude", [0.0, 0.02])
def test_noise_in_the_costs_below_the_margin_moves_nothing_back_and_forth(amplitude):
    """All sizes equally fast and moving free: only noise speaks for a move."""
    rng = np.random.default_rng(3)

    class Noisy(Roofline):
        kv_tokens, prefill_token_s = 1e9, 0.0

        def decode_s(self, contexts, remaining) -> float:
            return float(remaining.max()) * (1.0 + amplitude * rng.uniform(-1.0, 1.0))

    where = fleet(8, 1, 1)
    for _ in range(5):
        policy = consolidation(Noisy)
        policy.begin(where, LONG)
        for now, left in enumerate((120, 88, 64, 47, 34, 25, 18, 13, 9, 6, 4)):
            assert observe(policy, 0.5, attempts(left, where), 0, float(now)) is None
