"""Weights cross the slow link once and reach every rollout device whole."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollpacker.policy.gradients.transfer_plan import plan_transfers


@given(
    elements=st.integers(1, 5000),
    align=st.sampled_from([1, 2, 4]),
    train=st.integers(1, 9),
    rollout=st.integers(1, 9),
)
def test_one_copy_crosses_and_everybody_gets_all(
    elements: int, align: int, train: int, rollout: int
) -> None:
    size = elements * align
    trainers, rollers = range(train), range(100, 100 + rollout)
    plan = plan_transfers(size, trainers, rollers, align=align)
    assert plan.slow_bytes == size
    holds = {rank: set() for rank in rollers}
    for each in plan.transfers:
        shard = (each.start, each.stop)
        assert each.start % align == 0
        if each.slow:
            assert each.source in trainers
        else:
            assert shard in holds[each.source], "broadcast before it arrived"
        for target in each.targets:
            assert shard not in holds[target], "sent twice"
            holds[target].add(shard)
    for shards in holds.values():
        ordered = sorted(shards)
        assert ordered[0][0] == 0
        assert ordered[-1][1] == size
        assert all(a[1] == b[0] for a, b in pairwise(ordered))


@pytest.mark.parametrize(
    ("size", "train", "rollout", "what"),
    [
        (10, [], [1], "both pools"),
        (10, [0], [0], "one side"),
        (10, [0, 0], [1], "one side"),
        (11, [0], [1], "no whole elements"),
    ],
)
def test_what_makes_no_plan(size: int, train: list[int], rollout: list[int], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        plan_transfers(size, train, rollout)
