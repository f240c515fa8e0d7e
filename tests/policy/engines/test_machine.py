"""A machine of measured engines: sizes, replicas, the costs of steps and gradients."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from policy_world import settings

from rollpacker.core.types import EngineId, RoundKind
from rollpacker.policy.engines.hardware import (
    EngineProfile,
    LatencyCurve,
    consolidation_threshold,
    measured,
)
from rollpacker.policy.ledger import Ledger
from rollpacker.policy.lengths import LengthHistory
from rollpacker.policy.regrouping import Regrouping


def profile(kv_tokens: float, prefill_token_s: float = 1e-4) -> EngineProfile:
    return EngineProfile(
        kv_tokens=kv_tokens, latency={1: 1e-2, 64: 2e-2}, prefill_token_s=prefill_token_s
    )


def node(*sizes: int, kv_tokens: float = 1000.0, **more: int):
    return measured({s: profile(s * kv_tokens) for s in sizes}, devices=8, node_size=8, **more)


def test_a_gradient_token_costs_three_prefilled_ones_on_the_smallest_engine():
    machine = measured({2: profile(1, 1e-3), 4: profile(2, 7e-4)}, devices=4, node_size=4)
    assert machine.engine_devices == 2
    assert machine.train_token_s == pytest.approx(3 * 2 * 1e-3)


def test_replicas_have_the_number_of_their_first_engine():
    machine = node(2, 4, replica_devices=4)
    fleet = machine.fleet(tuple(map(EngineId, range(4))), 2)
    assert fleet.beside == {0: (0, 1), 2: (2, 3)}
    assert machine.fleet(tuple(map(EngineId, range(4))), 4).beside == {0: (0,), 2: (2,)}


def test_heads_of_keys_and_values_are_split_up_or_repeated():
    assert node(2, 4, 8, heads=16, kv_heads=4).sizes == (2, 4, 8)
    assert measured({3: profile(1)}, devices=3, node_size=3, heads=12, kv_heads=3).sizes == (3,)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: node(2, replica_devices=1), "a replica of 1 devices holds no whole engines of 2"),
        (lambda: node(2, replica_devices=3), "a replica of 3 devices holds no whole engines of 2"),
        (lambda: node(1, 2, heads=9), "engines of 2 devices: 2 does not divide its 9 attention"),
        (lambda: node(3), "engines of 3 devices: they do not divide 8 devices in nodes of 8"),
        (
            lambda: measured({4: profile(1)}, devices=6, node_size=8),
            "engines of 4 devices: they do not divide 6 devices in nodes of 8",
        ),
        (
            lambda: measured({2: profile(1), 3: profile(1)}, devices=6, node_size=6),
            "engines of 3 devices: they are no multiple of engines of 2",
        ),
        (
            lambda: measured({3: profile(1)}, devices=3, node_size=3, heads=12, kv_heads=2),
            "3 parts neither split nor repeat its 2 heads of keys and values evenly",
        ),
    ],
)
def test_a_machine_that_cannot_be_is_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_engines_are_smaller_when_none_of_the_planned_size_is_left():
    rollout = {"prompts_per_step": 1, "num_generations": 2, "planner": "paper"}
    told = settings(rollout, {}, stream=False, machine=node(1, 2, 4))
    engines = Regrouping(told, LengthHistory(window=4), Ledger())
    state = {"full": {"tp": 4, "previous": 0, "calm": 0}}
    engines.load_state_dict({"planner": state, "prompt_tokens": {}})
    live = tuple(map(EngineId, (0, 1, 2, 5)))
    assert engines.lay_out(RoundKind.FULL, tuple(map(EngineId, range(8)))) == (0, 4)
    assert engines.lay_out(RoundKind.FULL, live) == (0,)
    assert [form.members for form in engines.regroups] == [(0, 1)]
    assert engines.lay_out(RoundKind.FULL, live[1:]) == (1, 2, 5)
    assert not engines.regroups


# One curve for all who ask how long a decode step takes.


CPU = LatencyCurve({1: 0.17e-3, 4: 0.22e-3, 16: 0.36e-3, 32: 0.59e-3, 64: 1.2e-3, 128: 3.0e-3})
GPU = LatencyCurve({1: 0.010, 16: 0.011, 64: 0.0135, 128: 0.018, 256: 0.027})


def test_the_curve_goes_through_its_points():
    for batch, seconds in CPU.points.items():
        assert CPU.at(batch) == pytest.approx(seconds)
    assert CPU.at(0) == 0.0
    assert CPU.at(10) == pytest.approx(0.29e-3)
    assert CPU.at(192) == pytest.approx(4.8e-3)
    assert LatencyCurve({4: 2.0}).at(100) == 2.0


@given(st.dictionaries(st.integers(1, 300), st.floats(1e-5, 1.0), min_size=1), st.floats(0, 500))
def test_a_noisy_curve_is_made_to_rise(points, batch):
    curve = LatencyCurve(points)
    assert curve.at(batch) <= curve.at(batch + 1) + 1e-12


@pytest.mark.parametrize("points", [{}, {0: 1.0}, {1: 0.0}, {1: -1.0}])
def test_a_curve_without_a_measurement_is_refused(points):
    with pytest.raises(ValueError, match="latency curve"):
        LatencyCurve(points)


def test_what_an_engine_does_not_decode_together_takes_turns():
    profile = EngineProfile(
        kv_tokens=1e6, latency=dict(GPU.points), context_token_s=1e-6, prefill_token_s=0.0
    )
    batch, context = np.array([1.0, 40.0, 256.0, 512.0]), np.array([0.0, 0.0, 1e3, 1e3])
    expected = [GPU.at(1), GPU.at(40), GPU.at(256) + 1e-3, 2 * GPU.at(256) + 1e-3]
    assert profile.step_s(batch, context) == pytest.approx(expected)


@given(st.integers(2, 8), st.floats(0.0, 1.0))
def test_the_threshold_is_the_largest_batch_within_the_slack(workers, slack):
    found = consolidation_threshold(CPU.at, workers, 200, slack)

    def free(n):
        return CPU.at(n) <= (1 + slack) * CPU.at(math.ceil(n / workers))

    assert found == max(n for n in range(201) if n == 0 or free(n))
    assert found >= 1


def test_thresholds_of_known_devices():
    assert consolidation_threshold(CPU.at, 1, 200) == 0
    assert 4 <= consolidation_threshold(CPU.at, 2, 256) <= 16
    assert consolidation_threshold(GPU.at, 8, 256) > 50
    assert consolidation_threshold(lambda n: n, 2, 256, slack=0.1) == 1
    assert consolidation_threshold(lambda n: 1.0, 2, 256) == 256
