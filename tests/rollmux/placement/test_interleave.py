"""Cycles and permit orders: the theorem, its counterexample, and what round-robin promises."""

import ast
import dataclasses
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollpacker.rollmux.model.seat import POOLS, TRAIN, Seat, SeatState
from rollpacker.rollmux.placement import cycles
from rollpacker.rollmux.placement.group_simulation import rehearse

seconds = st.floats(1.0, 500.0)


@st.composite
def groups(draw: st.DrawFn, *, overlap: bool = False, most: int = 5) -> list[Seat]:
    """Jobs on three rollout nodes and one training node; gangs may overlap."""
    masks = (1, 2, 4, 3, 6, 5, 7) if overlap else (1, 2, 4)
    count = draw(st.integers(1, most))
    return [
        Seat(str(n), (draw(st.sampled_from(masks)), 1), draw(seconds), draw(seconds), 1e9)
        for n in range(count)
    ]


def in_order(seats: list[Seat]) -> list[Seat]:
    for position, seat in enumerate(seats):
        seat.position = position
    return seats


@given(groups())
def test_the_formula_is_the_max_plus_cycle_where_it_holds(seats: list[Seat]) -> None:
    assert cycles.formula_holds(seats)
    assert cycles.max_plus_cycle(seats) == pytest.approx(cycles.load_bound(seats))
    assert cycles.cycle(seats) == cycles.load_bound(seats)


@given(groups(overlap=True))
def test_the_formula_is_a_lower_bound_always(seats: list[Seat]) -> None:
    assert cycles.max_plus_cycle(seats) >= cycles.load_bound(seats) - 1e-6


def test_a_triangle_of_gangs_takes_thirty_not_twenty() -> None:
    triangle = [Seat(str(n), (mask, 1), 10.0, 1e-6) for n, mask in enumerate((3, 6, 5))]
    assert cycles.load_bound(triangle) == pytest.approx(20.0)
    assert not cycles.formula_holds(triangle)
    assert cycles.cycle(triangle) == pytest.approx(30.0, abs=1e-3)


def run(seats: list[Seat], durations: list[list[tuple[float, float]]], rounds: int) -> list[float]:
    """Ends of all iterations under round-robin, in order, per member and round."""
    ends: dict[tuple[int, int], float] = {}
    now, running, count = 0.0, [], [0] * len(seats)
    while len(ends) < rounds * len(seats):
        for pool in POOLS:
            while (seat := cycles.round_robin(seats, pool, now)) is not None:
                index = seats.index(seat)
                pair = durations[index][min(count[index], rounds - 1)]
                seat.start(pool, now)
                running.append((now + pair[pool], index))
        now, index = min(running)
        running.remove((now, index))
        seat = seats[index]
        pool = seat.pool
        seat.finish(pool, now)
        seat.ask()
        if pool == TRAIN:
            if count[index] < rounds:
                ends[index, count[index]] = now
            count[index] += 1
    return [ends[n, k] for n in range(len(seats)) for k in range(rounds)]


@settings(max_examples=settings().max_examples // 2)
@given(groups(overlap=True, most=4))
def test_round_robin_without_noise_runs_at_the_max_plus_cycle(seats: list[Seat]) -> None:
    cycle = cycles.cycle(seats)
    rounds = 40
    ends = run(in_order(seats), [[(seat.r, seat.t)] * rounds for seat in seats], rounds)
    last = [
        ends[(n + 1) * rounds - 1] - ends[n * rounds + rounds // 2 - 1] for n in range(len(seats))
    ]
    # Not every period is one round long, so the mean over some rounds is near, not equal.
    assert max(last) / (rounds / 2) == pytest.approx(cycle, rel=0.08)


@settings(max_examples=settings().max_examples // 2)
@given(st.data())
def test_shorter_phases_never_end_anything_later(data: st.DataObject) -> None:
    """Durations up to the worst case imply completion up to the plan."""
    seats = data.draw(groups(overlap=True, most=4))
    share = st.floats(0.05, 1.0)
    rounds = 5
    worst = [[(seat.r, seat.t)] * rounds for seat in seats]
    real = [[(r * data.draw(share), t * data.draw(share)) for r, t in each] for each in worst]
    again = [Seat(s.job, s.masks, s.r, s.t) for s in seats]
    plan = run(in_order(seats), worst, rounds)
    done = run(in_order(again), real, rounds)
    assert all(d <= p + 1e-6 for d, p in zip(done, plan, strict=True))


def slowdowns(order: cycles.Order, seats: list[Seat]) -> list[float]:
    return rehearse(seats, [[(seat.r, seat.t)] for seat in seats], order)


def test_a_short_job_beside_a_long_one_suffers_less_under_deadlines() -> None:
    def pair() -> list[Seat]:
        return in_order([Seat("s", (1, 1), 60.0, 40.0, 4.0), Seat("l", (2, 1), 600.0, 300.0, 1.5)])

    strict, deadlines = (
        slowdowns(cycles.round_robin, pair()),
        slowdowns(cycles.earliest_deadline, pair()),
    )
    assert strict[0] == pytest.approx(9.0, rel=0.05)
    assert deadlines[0] < 3.7
    assert deadlines[1] < 1.5


def test_a_waiting_gang_is_not_starved_by_small_jobs() -> None:
    gang = Seat("gang", (7, 1), 50.0, 5.0, 3.0)
    small = [Seat(str(n), (1 << n, 2 << n), 60.0, 40.0, 3.0) for n in range(3)]
    slow = slowdowns(cycles.earliest_deadline, in_order([gang, *small]))
    assert max(slow) < 3.5


def test_a_phase_is_held_back_for_who_would_be_late() -> None:
    tight = Seat("tight", (1, 1), 80.0, 20.0, state=SeatState.RUN_R, expected_end=10.0)
    loose = Seat("loose", (2, 1), 80.0, 60.0, 3.0, state=SeatState.WAIT_T)
    tight.promise(1.05, since=-80.0)
    assert cycles.earliest_deadline([tight, loose], TRAIN, 0.0) is None
    tight.promise(3.0, since=-80.0)
    assert cycles.earliest_deadline([tight, loose], TRAIN, 0.0) is loose


def test_only_methods_of_a_seat_change_it() -> None:
    fields = {each.name for each in dataclasses.fields(Seat)}
    trees = [ast.parse(path.read_text()) for path in Path(cycles.__file__).parent.glob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    written = [node for node in nodes if isinstance(node.ctx, ast.Store) and node.attr in fields]
    found = {ast.unparse(node) for node in written}
    assert {each for each in found if not each.startswith("self.")} == set()
