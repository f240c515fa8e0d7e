"""Freeing devices: whole groups, whole replicas, never all, only what fits, never back."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollpacker.core.types import AttemptId, EngineId, ReplicaId
from rollpacker.policy.engines.fleet import Fleet, cheapest_half, grid
from rollpacker.policy.engines.scaling import (
    ActiveAttempt,
    Consolidation,
    Halving,
    ScaleDecision,
    Scaling,
    peak_tokens,
    remaining_tokens,
)
from rollpacker.policy.lengths import KaplanMeier, Observations

NOTHING = Observations.of([])


def curve(lengths) -> KaplanMeier:
    return KaplanMeier.fit(Observations.of(lengths), NOTHING)


LENGTHS = curve([int(x) for x in np.exp(np.random.default_rng(0).normal(6, 1, 500))])


def fleet(devices: int, tp: int, replica: int, node: int = 8) -> Fleet:
    every = grid(devices, node)
    return Fleet(
        layout="colocated",
        engines={EngineId(n): every[n * tp : (n + 1) * tp] for n in range(devices // tp)},
        replicas={
            ReplicaId(n): every[n * replica : (n + 1) * replica] for n in range(devices // replica)
        },
    )


class Roofline:
    """Decode and prefill of a 32B model on ``tp`` H800s of a node, after the simulator's costs."""

    weights, kv_token, layers = 65e9, 64 * 2 * 8 * 128 * 2, 64

    def __init__(self, tp: int) -> None:
        self.tp = tp

    @property
    def kv_tokens(self) -> float:
        return max(0.0, (self.tp * 64e9 - self.weights) / self.kv_token)

    @property
    def prefill_token_s(self) -> float:
        return self.weights / (self.tp * 990e12 * 0.5)

    def step_seconds(self, batch: int, tokens: float) -> float:
        fixed = 4.5e-3 + 60e-6 * batch + (self.tp > 1) * 50e-6 * self.layers
        read = self.weights / (self.tp * 3.35e12 * 0.92)
        return fixed + read + tokens * self.kv_token / (min(self.tp, 8) * 3.35e12 * 0.75)

    def decode_s(self, contexts, remaining) -> float:
        order = np.argsort(remaining)
        ends, held = remaining[order].tolist(), contexts[order].tolist()
        seconds, before, total = 0.0, 0, float(sum(held))
        for place, end in enumerate(ends):
            batch = len(ends) - place
            steps = end - before
            middle = total + batch * steps / 2
            seconds += steps * self.step_seconds(batch, middle)
            total += batch * steps - held[place] - end
            before = end
        return seconds


def consolidation(
    cost: Any = Roofline, sizes=(1, 2, 4, 8), train_token_s: float = 0.0
) -> Consolidation:
    return Consolidation({size: cost(size) for size in sizes}, train_token_s)


POLICIES = {
    "paper": lambda: Halving(lambda tp: 3e4 * tp),
    "fixed": lambda: Halving(first=0.4, last=1.0),
    "ours": lambda: consolidation(train_token_s=1e-3),
}

fleets = st.builds(
    lambda nodes, tp, replica: fleet(8 * nodes, tp, replica),
    st.integers(1, 4),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 2, 4, 8, 16]),
)


def observe(policy: Scaling, finished: float, active, work: int, now: float):
    return policy.observe(finished, len(active), lambda: active, work, now)


class Round:
    """A round that obeys a policy's decisions and checks each of them."""

    def __init__(self, policy: Scaling, where: Fleet, attempts: int, rng: random.Random):
        self.policy, self.fleet, self.rng = policy, where, rng
        self.groups = {w: tuple(sorted(devices)) for w, devices in where.engines.items()}
        self.freed: set[EngineId] = set()
        self.total = attempts
        engines = sorted(where.engines)
        self.active = {
            AttemptId(n): ActiveAttempt(
                attempt=AttemptId(n),
                prompt_tokens=rng.randrange(1, 500),
                generated=rng.randrange(0, 300),
                engine=engines[n % len(engines)],
            )
            for n in range(attempts)
        }

    def grow(self) -> None:
        tokens = self.rng.randrange(1, 400)
        self.active = {
            key: replace(one, generated=one.generated + tokens) for key, one in self.active.items()
        }
        gone = self.rng.sample(sorted(self.active), self.rng.randrange(len(self.active) + 1) // 3)
        for attempt in gone:
            del self.active[attempt]

    def observe(self, now: float) -> ScaleDecision | None:
        finished = 1.0 - len(self.active) / self.total
        work = (self.total - len(self.active)) * 800
        decision = observe(self.policy, finished, list(self.active.values()), work, now)
        if decision is not None:
            self.check(decision)
            self.obey(decision)
        return decision

    def check(self, made: ScaleDecision) -> None:
        present = {m for group in self.members().values() for m in group}
        assert set(made.freed) <= present
        assert present - set(made.freed), "every device was freed"
        assert not set(made.freed) & self.freed, "a engine was freed twice"
        for lead, members in made.groups.items():
            devices = [d for m in members for d in self.fleet.engines[m]]
            assert lead in members
            assert len(devices) == made.tp
            assert len({(d.node, d.index // made.tp) for d in devices}) == 1
            assert not set(members) & (set(made.freed) | self.freed)
        for attempt, target in made.moves.items():
            assert attempt in self.active
            assert target not in made.freed
            assert target not in self.freed

    def members(self) -> dict[EngineId, tuple[EngineId, ...]]:
        owner = {d: w for w, devices in self.fleet.engines.items() for d in devices}
        return {
            lead: tuple(sorted({owner[d] for d in devices}))
            for lead, devices in self.groups.items()
        }

    def obey(self, made: ScaleDecision) -> None:
        self.freed |= set(made.freed)
        if made.groups:
            self.groups = {
                lead: tuple(sorted(d for m in members for d in self.fleet.engines[m]))
                for lead, members in made.groups.items()
            }
        else:
            self.groups = {w: g for w, g in self.groups.items() if w not in made.freed}
        for attempt, engine in made.moves.items():
            self.active[attempt] = replace(self.active[attempt], engine=engine)
        assert all(one.engine in self.groups for one in self.active.values())

    def lose(self) -> None:
        """The first group that decodes dies; so do its attempts."""
        if len(self.groups) < 2:
            return
        lead = min(self.groups)
        for engine in self.members()[lead]:
            self.policy.lose(engine)
        del self.groups[lead]
        self.active = {k: one for k, one in self.active.items() if one.engine != lead}


@pytest.mark.parametrize("name", POLICIES)
@given(where=fleets, attempts=st.integers(1, 150), seed=st.integers(0, 999), data=st.data())
@settings(max_examples=settings().max_examples // 2)
def test_decisions_keep_groups_whole_and_some_devices_decoding(name, where, attempts, seed, data):
    lose_at = data.draw(st.sampled_from([None, 2, 5]))
    runs = []
    for _ in range(2):
        policy = POLICIES[name]()
        policy.begin(where, LENGTHS)
        world = Round(policy, where, attempts, random.Random(seed))
        made = []
        for step in range(12):
            if not world.active:
                break
            if step == lose_at:
                world.lose()
            if world.active:
                made.append(world.observe(float(step)))
                world.grow()
        runs.append(made)
    assert runs[0] == runs[1]
    if name != "ours":
        assert sum(one is not None for one in runs[0]) <= 1


@given(fleets, st.integers(0, 99))
def test_a_half_is_half_of_the_devices_in_whole_groups_and_replicas(where, seed):
    rng = random.Random(seed)
    load = {engine: rng.randrange(100) for engine in where.engines}
    half = cheapest_half(where, load)
    units = where.units()
    if half is None:
        assert len(units) % 2 or len(where.at) < len(where.devices)
        return
    devices = {d for w in half for d in where.engines[w]}
    assert 2 * len(devices) == len(where.devices)
    free = where.trainable(where.devices - devices)
    assert {d for each in free for d in where.replicas[each]} == devices
    assert all(set(unit) <= set(half) or not set(unit) & set(half) for unit in units)
    size = len(units) // 2
    price = sorted(sum(load[w] for w in unit) for unit in units)
    assert sum(load[w] for w in half) == sum(price[:size])


def test_a_single_group_or_replica_cannot_be_halved():
    load = dict.fromkeys(map(EngineId, range(8)), 0)
    assert cheapest_half(fleet(8, 8, 1), load) is None
    assert cheapest_half(fleet(8, 1, 8), load) is None
    assert cheapest_half(fleet(8, 2, 4), load) == (2, 3)
    assert cheapest_half(fleet(24, 8, 8), load) is None


def test_a_replica_that_lost_a_device_is_not_freed():
    load = dict.fromkeys(map(EngineId, range(16)), 9) | {EngineId(15): 0}
    left = fleet(16, 1, 4).without(EngineId(15))
    left = left and left.without(EngineId(0))
    assert left is not None
    assert cheapest_half(left, load) is None
    left = fleet(16, 2, 2).without(EngineId(7))
    left = left and left.without(EngineId(0))
    assert left is not None
    assert cheapest_half(left, load) == (4, 5, 6)


def attempts(count: int, where: Fleet, generated: int = 100) -> list[ActiveAttempt]:
    engines = sorted(where.engines)
    return [
        ActiveAttempt(
            attempt=AttemptId(n),
            prompt_tokens=50,
            generated=generated,
            engine=engines[n % len(engines)],
        )
        for n in range(count)
    ]


def test_the_papers_rule_tries_each_mark_once_between_20_and_50_percent():
    where = fleet(8, 1, 2)
    asked = []

    def room(tp: int) -> float:
        asked.append(tp)
        return 0.0

    policy = Halving(room)
    policy.begin(where, LENGTHS)
    for percent in range(101):
        assert observe(policy, percent / 100, attempts(100 - percent or 1, where), 0, 0.0) is None
    assert len(asked) == 7


def test_the_papers_rule_frees_half_when_the_rest_fits_and_not_before():
    where, lengths = fleet(8, 1, 2), curve([1000])
    policy = Halving(lambda tp: (20 * 1050 + 1) / 0.95)
    policy.begin(where, lengths)
    assert observe(policy, 0.2, attempts(81, where), 0, 0.0) is None
    decision = observe(policy, 0.25, attempts(80, where), 0, 0.0)
    assert decision is not None
    assert decision.freed == (4, 5, 6, 7)
    assert decision.tp == 1
    assert set(decision.moves.values()) == {0, 1, 2, 3}
    assert observe(policy, 0.3, attempts(40, where), 0, 0.0) is None


def test_without_length_history_the_papers_rule_waits():
    policy = Halving(lambda tp: 1e12)
    policy.begin(fleet(8, 1, 1), None)
    assert observe(policy, 0.4, attempts(8, fleet(8, 1, 1)), 0, 0.0) is None
    policy.begin(fleet(8, 1, 1), LENGTHS)
    assert observe(policy, 0.4, attempts(8, fleet(8, 1, 1)), 0, 0.0) is not None


@pytest.mark.parametrize("fraction", [0.2, 0.3, 0.4])
def test_the_fixed_rule_frees_half_once_at_its_fraction(fraction):
    where = fleet(8, 2, 4)
    policy = Halving(first=fraction, last=1.0)
    policy.begin(where, None)
    fired = [
        percent
        for percent in range(100)
        if observe(policy, percent / 100, attempts(100 - percent, where), 0, 0.0)
    ]
    assert fired == [round(100 * fraction)]


@given(st.lists(st.tuples(st.integers(1, 500), st.integers(1, 500)), min_size=1, max_size=30))
def test_the_peak_is_that_of_a_step_by_step_count(pairs):
    contexts, remaining = np.array(pairs, np.int64).T
    held = [sum(c + t for c, r in pairs if r >= t) for t in range(1, int(remaining.max()) + 1)]
    assert peak_tokens(contexts, remaining) == max(held)


def test_likely_lengths_have_the_longest_of_a_random_draw():
    where = fleet(8, 1, 1)
    active = attempts(64, where, generated=0)
    likely = remaining_tokens(LENGTHS, active)
    longest = np.sum(1.0 - (1.0 - LENGTHS.survival) ** 64)
    assert likely.max() == pytest.approx(longest, rel=0.35)
    assert likely.mean() == pytest.approx(LENGTHS.mean(), rel=0.1)
    shuffled = remaining_tokens(LENGTHS, active[::-1])
    assert (shuffled[::-1] == likely).all()
