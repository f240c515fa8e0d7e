"""A group run ahead: tails leave their nodes as they do in the cluster."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollpacker.rollmux.model.seat import Seat, SeatState
from rollpacker.rollmux.model.tail_model import extra_beside, to_release
from rollpacker.rollmux.placement.admission import overloaded
from rollpacker.rollmux.placement.group_simulation import rehearse


def one_rollout_node(target: float = 2.0) -> list[Seat]:
    """Two members of 100 + 20 s that share a rollout node; each trains on a node of its own."""
    return [
        Seat("a", (1, 1), 100.0, 20.0, target, position=0),
        Seat("b", (1, 2), 100.0, 20.0, target, position=1),
    ]


def slowdowns(seats: list[Seat], tails: str) -> list[float]:
    durations = [[(seat.r, seat.t)] for seat in seats]
    return rehearse(seats, durations, tails=set(tails))


def test_a_tail_lets_the_next_rollout_begin() -> None:
    whole = slowdowns(one_rollout_node(), "")
    assert min(whole) >= 200 / 120 - 1e-9
    # One begins after 70% of the other, and takes a quarter longer while its tail goes on.
    both = slowdowns(one_rollout_node(), "ab")
    assert both == pytest.approx([1.26, 1.26], abs=0.05)
    one = slowdowns(one_rollout_node(), "a")
    assert max(both) < max(one) < max(whole)


def test_nobody_leaves_a_tail_who_cannot_afford_it() -> None:
    tight = one_rollout_node(target=1.04)
    assert slowdowns(tight, "ab") == slowdowns(one_rollout_node(target=1.04), "")


def test_what_tails_make_possible_is_not_refused_beforehand() -> None:
    seats = one_rollout_node(target=1.5)
    assert overloaded(seats, 0.0)
    assert overloaded(seats, 0.0, {"a"}) is False  # 0.56 and 0.43 of the time
    assert overloaded(one_rollout_node(target=1.25), 0.0, {"a"})
    assert not overloaded(one_rollout_node(target=1.35), 0.0, {"a", "b"})
    assert overloaded(one_rollout_node(target=1.25), 0.0, {"a", "b"})


def test_a_tail_is_left_to_who_waits_and_once_a_node() -> None:
    running = Seat("a", (1, 1), 100.0, 20.0, 2.0, state=SeatState.RUN_R, busy=1)
    waiting = Seat("b", (1, 2), 100.0, 20.0, 2.0, state=SeatState.WAIT_R)
    elsewhere = Seat("c", (2, 4), 100.0, 20.0, 2.0, state=SeatState.WAIT_R)
    tailing = Seat("d", (1, 8), 100.0, 20.0, 2.0, state=SeatState.RUN_R, busy=0)

    def released(*seats: Seat, reached: bool = True) -> list[Seat]:
        return to_release(seats, lambda _: reached)

    assert released(running, waiting) == [running]
    assert released(running, waiting, reached=False) == []
    assert released(running, elsewhere) == []
    assert released(running, waiting, tailing) == []


@given(seconds=st.floats(1.0, 1e4), tail_s=st.floats(-10.0, 1e4))
def test_beside_a_tail_a_rollout_takes_a_third_longer_at_most(
    seconds: float, tail_s: float
) -> None:
    expected = min(max(0.0, tail_s) / 4.0, seconds / 3.0)
    assert extra_beside(seconds, tail_s) == pytest.approx(expected)


@settings(max_examples=settings().max_examples // 2)
@given(
    phases=st.lists(
        st.tuples(st.floats(50.0, 500.0), st.floats(20.0, 200.0)), min_size=1, max_size=4
    )
)
def test_tails_change_nothing_for_who_shares_no_rollout_node(
    phases: list[tuple[float, float]],
) -> None:
    def seats() -> list[Seat]:
        return [Seat(f"{n}", (1 << n, 1), r, t, 3.0, position=n) for n, (r, t) in enumerate(phases)]

    names = {seat.job for seat in seats()}
    durations = [[pair] for pair in phases]
    with_tails = rehearse(seats(), durations, tails=names)
    assert with_tails == rehearse(seats(), durations)
