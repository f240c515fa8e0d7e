"""How a replica's members divide its micro-batches."""

from __future__ import annotations

import pytest
from tiny_models import group_batch, make_model

from rollpacker.config import GRPOConfig
from rollpacker.train.model import packing
from rollpacker.train.model.packing import Costs, Item, deal


def _plans(count, budget, mode):
    groups = group_batch(make_model(), GRPOConfig(), count=count)
    items = [
        Item(s, float(a), n)
        for n, g in enumerate(groups)
        for s, a in zip(g.samples, g.advantages, strict=True)
    ]
    return packing.plan(items, budget, mode, Costs(1.0, 0.0))[0], items


@pytest.mark.parametrize("mode", ["padded", "prompt_shared"])
@pytest.mark.parametrize("members", [1, 2, 3, 8, 30])
@pytest.mark.parametrize(("count", "budget"), [(1, 10_000), (5, 100), (5, 1)])
def test_every_response_counts_once_and_members_run_equally_many(mode, members, count, budget):
    plans, items = _plans(count, budget, mode)
    dealt = [deal(plans, member, members) for member in range(members)]
    assert len({len(each) for each in dealt}) == 1
    counted = [i for each in dealt for plan, counts in each if counts for i in plan]
    assert sorted(map(id, counted)) == sorted(map(id, items))
    repeated = sum(not counts for each in dealt for _, counts in each)
    # A micro-batch is repeated only where every response has one of its own.
    assert not repeated or all(len(p) == 1 for each in dealt for p, counts in each if counts)
    if members == 1:
        assert [plan for plan, _ in dealt[0]] == plans


def test_a_cut_leaves_about_as_many_tokens_on_both_sides():
    plans, items = _plans(1, 10_000, "padded")
    one, two = (deal(plans, member, 2)[0][0] for member in range(2))
    tokens = [sum(i.prompt_length + i.inputs for i in part) for part in (one, two)]
    assert abs(tokens[0] - tokens[1]) <= 2 * max(i.prompt_length + i.inputs for i in items)


def test_nothing_to_run_is_nothing_for_all():
    assert [deal([], member, 3) for member in range(3)] == [[], [], []]
