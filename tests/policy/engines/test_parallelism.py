"""Sizes: what the paper's rule does, and that forecasts move for savings and not for noise."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollpacker.core import events as ev
from rollpacker.core.types import PromptId, RoundKind
from rollpacker.policy.engines.parallelism import (
    Devices,
    ForecastPlanner,
    LengthForecast,
    PaperPlanner,
    Planner,
    occupancy,
)
from rollpacker.policy.lengths.lengths import LengthHistory

NODE = Devices(node_size=8, device_bytes=64e9, weight_bytes=15e9)
SHORT, LONG = RoundKind.SHORT, RoundKind.LONG
LENGTHS = LengthForecast(running=np.array([4.0, 2.0, 1.0, 0.0]), prompt_tokens=100.0)


def report(kind: RoundKind, tp: int, preemptions: int = 0, seconds: float = 100.0, peak: float = 0):
    measured = ev.RoundMeasured(step=0, preemptions=preemptions, peak_kv=peak, seconds=seconds)
    return kind, tp, measured


def paper(initial: int = 1, devices: Devices = NODE) -> PaperPlanner:
    return PaperPlanner(devices, initial)


def run(planner: Planner, kind: RoundKind, preemptions: list[int]) -> list[int]:
    sizes = []
    for count in preemptions:
        planner.observe(*report(kind, planner.plan(kind), count))
        sizes.append(planner.plan(kind))
    return sizes


@given(
    node=st.sampled_from([1, 2, 4, 6, 8, 16]),
    device=st.floats(1.0, 100.0),
    weights=st.floats(0.1, 1000.0),
    heads=st.sampled_from([0, 12, 28, 40]),
)
def test_sizes_divide_the_node_and_hold_the_weights(node, device, weights, heads):
    devices = Devices(node_size=node, device_bytes=device, weight_bytes=weights, heads=heads)
    possible = [
        s for s in range(1, node + 1) if node % s == 0 and heads % s == 0 and s * device > weights
    ]
    if not possible:
        with pytest.raises(ValueError, match="fit into no tensor-parallel group"):
            devices.sizes()
    else:
        assert list(devices.sizes()) == possible


def test_an_impossible_start_is_refused_with_the_possible_ones():
    tight = Devices(node_size=8, device_bytes=64e9, weight_bytes=65e9)
    with pytest.raises(ValueError, match="choose 2, 4, 8"):
        paper(1, tight)


def test_growing_preemptions_double_the_size_up_to_the_node():
    assert run(paper(), LONG, [100, 105, 111, 200, 400, 800]) == [1, 1, 2, 4, 8, 8]


def test_four_rounds_without_preemption_halve_it_down_to_what_fits():
    tight = Devices(node_size=8, device_bytes=64e9, weight_bytes=65e9)
    assert run(paper(8, tight), SHORT, [0] * 13) == [8, 8, 8, 4, 4, 4, 4, 2, 2, 2, 2, 2, 2]
    assert run(paper(8), SHORT, [0, 0, 0, 1, 0, 0, 0, 0]) == [8, 8, 8, 8, 8, 8, 8, 4]


def test_kinds_of_rounds_have_their_own_sizes():
    planner = paper(2)
    run(planner, LONG, [10, 20])
    run(planner, SHORT, [0, 0, 0, 0])
    assert (planner.plan(LONG), planner.plan(SHORT), planner.plan(RoundKind.FULL)) == (4, 1, 2)


reports = st.lists(
    st.tuples(
        st.sampled_from(list(RoundKind)), st.integers(0, 50), st.floats(1, 200), st.floats(0, 1)
    ),
    max_size=60,
)


def forecast_planner(**rules: float) -> ForecastPlanner:
    def cost(tp: int, lengths: LengthForecast) -> float:
        return lengths.prompt_tokens / tp**0.3 + 2.0 * tp

    def forecast(kind: RoundKind) -> LengthForecast:
        return replace(LENGTHS, prompt_tokens={SHORT: 100.0, LONG: 300.0}.get(kind, 200.0))

    return ForecastPlanner(NODE, 2, cost, forecast, **rules)


@pytest.mark.parametrize("build", [paper, forecast_planner])
@given(history=reports, cut=st.integers(0, 60))
@settings(max_examples=settings().max_examples // 2)
def test_same_reports_same_sizes_and_the_state_says_it_all(build, history, cut):
    first, second = build(), build()
    for place, (kind, preemptions, seconds, peak) in enumerate(history):
        if place == cut:
            restored = build()
            restored.load_state_dict(json.loads(json.dumps(second.state_dict())))
            second = restored
        assert first.plan(kind) == second.plan(kind)
        assert first.plan(kind) in NODE.sizes()
        seen = report(kind, first.plan(kind), preemptions, seconds, peak)
        first.observe(*seen)
        second.observe(*seen)
    assert first.state_dict() == second.state_dict()
    assert [first.plan(kind) for kind in RoundKind] == [second.plan(kind) for kind in RoundKind]


class Noisy:
    """True times by size; predictions and measurements that are off by the given factors."""

    def __init__(self, times: dict[int, float], noise, **rules):
        self.times, self.noise = times, noise
        self.planner = ForecastPlanner(
            NODE,
            1,
            lambda tp, lengths: times[tp] * next(noise),
            lambda kind: LENGTHS,
            **rules,
        )

    def sizes(self, rounds: int, start: int) -> list[int]:
        found = [start]
        for _ in range(rounds):
            tp = found[-1]
            self.planner.observe(*report(SHORT, tp, seconds=self.times[tp] * next(self.noise)))
            found.append(self.planner.plan(SHORT))
        return found


def switches(sizes: list[int]) -> int:
    return sum(a != b for a, b in pairwise(sizes))


times = st.fixed_dictionaries({tp: st.floats(50, 200) for tp in NODE.sizes()})


@given(times=times, start=st.sampled_from(NODE.sizes()), data=st.data())
@settings(max_examples=settings().max_examples // 2)
def test_bounded_noise_never_makes_a_size_come_back(times, start, data):
    """Each switch lowers the true time when (1 + a)^6 < 1 / (1 - margin), whatever the noise."""
    draws = data.draw(st.lists(st.sampled_from([1 / 1.017, 1.0, 1.017]), min_size=7, max_size=40))
    noise = iter(draws * 100)
    sizes = Noisy(times, noise, margin=0.1).sizes(40, start)
    path = [a for a, b in zip(sizes, [*sizes[1:], None], strict=True) if a != b]
    assert len(set(path)) == len(path)
    assert [times[tp] for tp in path] == sorted((times[tp] for tp in path), reverse=True)


@pytest.mark.parametrize("seed", range(5))
def test_random_noise_of_ten_percent_between_equal_sizes_moves_nothing_for_long(seed):
    rng = np.random.default_rng(seed)
    noise = iter(lambda: float(rng.uniform(0.9, 1.1)), None)
    equal = dict.fromkeys(NODE.sizes(), 100.0)
    rounds = 400
    assert switches(Noisy(equal, noise, margin=0.2).sizes(rounds, 1)) == 0


@pytest.mark.parametrize("seed", range(5))
def test_a_clear_saving_is_found_in_noise_and_kept(seed):
    rng = np.random.default_rng(seed)
    noise = iter(lambda: float(rng.uniform(0.93, 1.07)), None)
    sizes = Noisy({1: 100.0, 2: 80.0, 4: 60.0, 8: 75.0}, noise).sizes(200, 1)
    assert sizes[-1] == 4
    assert switches(sizes) <= 2


@given(times=times, start=st.sampled_from(NODE.sizes()))
def test_without_noise_it_ends_within_the_margin_of_the_best(times, start):
    noise = iter(lambda: 1.0, None)
    sizes = Noisy(times, noise, margin=0.1).sizes(30, start)
    assert times[sizes[-1]] * 0.9 <= min(times.values()) + 1e-9


def test_a_wrong_cost_model_is_found_out_after_one_move():
    measured = {1: 100.0, 2: 130.0, 4: 200.0, 8: 300.0}
    planner = ForecastPlanner(
        NODE,
        1,
        lambda tp, lengths: {1: 100.0, 2: 70.0, 4: 99.0, 8: 120.0}[tp],
        lambda kind: LENGTHS,
    )
    sizes = [1]
    for _ in range(60):
        planner.observe(*report(LONG, sizes[-1], seconds=measured[sizes[-1]]))
        sizes.append(planner.plan(LONG))
    assert 2 in sizes
    assert sizes[-1] == 1
    assert switches(sizes) == 2


def test_one_odd_round_moves_nothing():
    """The forecast of a single round speaks for another size."""
    rounds = iter([1.0, 1.0, 0.5, 1.0, 1.0, 1.0, 0.5, 1.0])
    now = {"factor": 1.0}
    planner = ForecastPlanner(
        NODE,
        1,
        lambda tp, lengths: 100.0 * (now["factor"] if tp == 2 else 1.0),
        lambda kind: LENGTHS,
    )
    for factor in rounds:
        now["factor"] = factor
        planner.observe(*report(SHORT, planner.plan(SHORT)))
        assert planner.plan(SHORT) == 1


def test_it_does_not_shrink_into_a_size_that_the_peak_would_not_fit():
    tight = Devices(node_size=4, device_bytes=64e9, weight_bytes=60e9)

    def end(peak: float) -> int:
        planner = ForecastPlanner(
            tight,
            4,
            lambda tp, lengths: 100.0 * tp,
            lambda kind: LENGTHS,
        )
        planner.observe(*report(LONG, 4, peak=peak))
        for _ in range(4):
            planner.observe(*report(LONG, planner.plan(LONG), peak=peak))
        return planner.plan(LONG)

    assert end(0.9) == 4
    assert end(0.6) == 2
    assert end(0.05) == 1


def test_without_a_forecast_it_stays():
    planner = ForecastPlanner(
        NODE,
        2,
        lambda tp, lengths: 1.0 / tp,
        lambda k: None,
    )
    assert planner.plan(SHORT) == 2
    planner.observe(*report(SHORT, 2))
    assert planner.plan(SHORT) == 2


def test_infinite_predictions_are_never_chosen():
    planner = ForecastPlanner(
        NODE,
        1,
        lambda tp, lengths: math.inf if tp > 2 else 100.0 / tp,
        lambda kind: LENGTHS,
    )
    assert run(planner, SHORT, [0] * 5)[-1] == 2


def test_occupancy_is_the_share_of_like_attempts_that_still_ran():
    history = LengthHistory(100)
    for prompt, length, censored in [("a", 2, False), ("b", 4, True), ("c", 4, False)]:
        history.observe(PromptId(prompt), length, censored, SHORT, 0)
    found = occupancy(history, SHORT, 30, 12.0)
    assert found is not None
    assert found.running == pytest.approx([30, 30, 20, 20, 0])
    assert occupancy(history, LONG, 30, 12.0) is None


def test_a_size_that_the_devices_of_now_cannot_have_is_forgotten():
    """As when a run goes on with fewer devices."""
    planner = paper(2)
    run(planner, LONG, [10, 20])
    run(planner, SHORT, [0])
    assert (planner.plan(LONG), planner.plan(SHORT)) == (4, 2)
    smaller = paper(1, replace(NODE, known=(1, 2)))
    smaller.load_state_dict(planner.state_dict())
    assert (smaller.plan(LONG), smaller.plan(SHORT)) == (1, 2)
