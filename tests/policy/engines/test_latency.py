"""One curve for all who ask how long a decode step takes."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollpacker.policy.engines.hardware import EngineProfile, LatencyCurve, consolidation_threshold

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
