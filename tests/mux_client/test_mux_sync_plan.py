"""Every byte crosses the slow link once, in equal shares of either pool."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollpacker.rollmux.sync_plan import plan_sync

POOLS = st.integers(1, 40)


@given(st.integers(0, 10_000), POOLS, POOLS)
def test_every_byte_is_sent_once_by_its_owner(total: int, training: int, rollout: int) -> None:
    plan = plan_sync(total, training=training, rollout=rollout)
    assert plan.slow_bytes == total
    assert plan.flat_bytes == total * rollout
    at = 0
    for piece in plan.pieces:
        assert piece.start == at
        assert piece.size > 0
        low, high = plan.shard(piece.source)
        assert low <= piece.start < piece.stop <= high
        at = piece.stop
    assert at == total
    assert len(plan.pieces) <= training + rollout - 1


@given(st.integers(1, 10_000), POOLS, POOLS)
def test_both_pools_share_the_work_equally(total: int, training: int, rollout: int) -> None:
    plan = plan_sync(total, training=training, rollout=rollout)
    for count, loads in (
        (training, [sum(p.size for p in plan.pieces if p.source == r) for r in range(training)]),
        (rollout, [sum(p.size for p in plan.pieces if p.entry == r) for r in range(rollout)]),
    ):
        assert max(loads) - min(loads) <= 1
        assert sum(loads) == total
        assert len(loads) == count


@given(st.integers(1, 10_000), POOLS, POOLS)
def test_a_pair_of_ranks_has_at_most_one_piece(total: int, training: int, rollout: int) -> None:
    """Messages between two ranks are matched by order alone."""
    pairs = [
        (p.source, p.entry) for p in plan_sync(total, training=training, rollout=rollout).pieces
    ]
    assert len(pairs) == len(set(pairs))


def test_seconds_are_those_of_one_copy_and_of_the_spread() -> None:
    plan = plan_sync(1000, training=2, rollout=4)
    assert plan.seconds(10.0, 100.0) == pytest.approx(100.0 + 7.5)


@pytest.mark.parametrize("pools", [(0, 1), (1, 0), (-1, 2)])
def test_empty_pools_are_refused(pools: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="training ranks"):
        plan_sync(8, training=pools[0], rollout=pools[1])
