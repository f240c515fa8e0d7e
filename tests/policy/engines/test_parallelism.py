"""Sizes: what the paper's rule does."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollpacker.core.types import RoundKind
from rollpacker.policy.engines.hardware import Devices, PaperPlanner

SIZES = (1, 2, 4, 8)
SHORT, LONG = RoundKind.SHORT, RoundKind.LONG


def paper(*sizes: int) -> PaperPlanner:
    return PaperPlanner(sizes or SIZES)


def grown(kind: RoundKind = LONG) -> PaperPlanner:
    """Rounds of this kind run at size 8."""
    planner = paper()
    assert run(planner, kind, [10, 20, 40, 80])[-1] == 8
    return planner


def run(planner: PaperPlanner, kind: RoundKind, preemptions: list[int]) -> list[int]:
    sizes = []
    for count in preemptions:
        planner.observe(kind, planner.plan(kind), count)
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


def test_growing_preemptions_double_the_size_up_to_the_node():
    assert run(paper(), LONG, [100, 105, 111, 200, 400, 800]) == [1, 1, 2, 4, 8, 8]


def test_four_rounds_without_preemption_halve_it_down_to_the_least():
    assert run(grown(SHORT), SHORT, [0] * 13) == [8, 8, 8, 4, 4, 4, 4, 2, 2, 2, 2, 1, 1]
    assert run(grown(SHORT), SHORT, [0, 0, 0, 1, 0, 0, 0, 0]) == [8, 8, 8, 8, 8, 8, 8, 4]


def test_kinds_of_rounds_have_their_own_sizes():
    planner = grown(LONG)
    run(planner, SHORT, [10, 20])
    assert (planner.plan(LONG), planner.plan(SHORT), planner.plan(RoundKind.FULL)) == (8, 2, 1)
    assert run(paper(1, 4), LONG, [10, 100, 1000]) == [1, 1, 1], "2 was not measured"


reports = st.lists(st.tuples(st.sampled_from(list(RoundKind)), st.integers(0, 50)), max_size=60)


@given(history=reports, cut=st.integers(0, 60))
@settings(max_examples=settings().max_examples // 2)
def test_same_reports_same_sizes_and_the_state_says_it_all(history, cut):
    first, second = paper(), paper()
    for place, (kind, preemptions) in enumerate(history):
        if place == cut:
            restored = paper()
            restored.load_state_dict(json.loads(json.dumps(second.state_dict())))
            second = restored
        assert first.plan(kind) == second.plan(kind)
        assert first.plan(kind) in SIZES
        first.observe(kind, first.plan(kind), preemptions)
        second.observe(kind, second.plan(kind), preemptions)
    assert first.state_dict() == second.state_dict()
    assert [first.plan(kind) for kind in RoundKind] == [second.plan(kind) for kind in RoundKind]


def test_a_size_that_the_devices_of_now_cannot_have_is_forgotten():
    """As when a run goes on with fewer devices."""
    planner = grown(LONG)
    run(planner, SHORT, [10, 20])
    smaller = paper(1, 2)
    smaller.load_state_dict(planner.state_dict())
    assert (smaller.plan(LONG), smaller.plan(SHORT)) == (1, 2)
