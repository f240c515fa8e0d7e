"""Who goes first in a group, by earliest deadline."""

import ast
import dataclasses
from pathlib import Path

from rollpacker.rollmux.model.seat import TRAIN, Seat, SeatState
from rollpacker.rollmux.placement import permit_order
from rollpacker.rollmux.placement.group_simulation import rehearse
from rollpacker.rollmux.placement.permit_order import earliest_deadline


def in_order(seats: list[Seat]) -> list[Seat]:
    for position, seat in enumerate(seats):
        seat.position = position
    return seats


def slowdowns(seats: list[Seat]) -> list[float]:
    return rehearse(in_order(seats), [[(seat.r, seat.t)] for seat in seats])


def test_a_short_job_beside_a_long_one_suffers_little() -> None:
    short, long = slowdowns(
        [Seat("s", (1, 1), 60.0, 40.0, 4.0), Seat("l", (2, 1), 600.0, 300.0, 1.5)]
    )
    assert short < 3.7
    assert long < 1.5


def test_a_waiting_gang_is_not_starved_by_small_jobs() -> None:
    gang = Seat("gang", (7, 1), 50.0, 5.0, 3.0)
    small = [Seat(str(n), (1 << n, 2 << n), 60.0, 40.0, 3.0) for n in range(3)]
    slow = slowdowns([gang, *small])
    assert max(slow) < 3.5


def test_a_phase_is_held_back_for_who_would_be_late() -> None:
    tight = Seat("tight", (1, 1), 80.0, 20.0, state=SeatState.RUN_R, expected_end=10.0)
    loose = Seat("loose", (2, 1), 80.0, 60.0, 3.0, state=SeatState.WAIT_T)
    tight.promise(1.05, since=-80.0)
    assert earliest_deadline([tight, loose], TRAIN, 0.0) is None
    tight.promise(3.0, since=-80.0)
    assert earliest_deadline([tight, loose], TRAIN, 0.0) is loose


def test_of_equal_deadlines_the_first_seat_goes_first() -> None:
    first, second = in_order(
        [Seat(name, (1, 1), 80.0, 20.0, 3.0, state=SeatState.WAIT_T) for name in ("a", "b")]
    )
    assert earliest_deadline([second, first], TRAIN, 0.0) is first


def test_only_methods_of_a_seat_change_it() -> None:
    fields = {each.name for each in dataclasses.fields(Seat)}
    trees = [
        ast.parse(path.read_text()) for path in Path(permit_order.__file__).parent.glob("*.py")
    ]
    nodes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    written = [node for node in nodes if isinstance(node.ctx, ast.Store) and node.attr in fields]
    found = {ast.unparse(node) for node in written}
    assert {each for each in found if not each.startswith("self.")} == set()
