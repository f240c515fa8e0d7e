"""Tails: the last responses of a rollout, which leave most of its nodes to the next job."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rollpacker.policy.engines.fleet import TAIL_ENGINES
from rollpacker.rollmux.model.seat import ROLLOUT, Seat, SeatState

TAIL_TIME = 0.70  # share of a rollout's time after which about 80% of its responses are done
TAIL_COST = 0.02  # relative slowdown of a rollout with a moved tail
SLOWEST_BESIDE = 1.0 / (1.0 - TAIL_ENGINES)
"""Largest slowdown of a rollout that starts on the workers that a tail has left."""
HELD = TAIL_TIME + (1.0 + TAIL_COST - TAIL_TIME) * TAIL_ENGINES
"""Share of a rollout's time for which it holds its nodes if its tail leaves most of them."""
TIGHT = 1.05
"""A rollout with a tighter slowdown limit keeps its tail, since a tail takes longer when moved."""


def extra_beside(seconds: float, tail_s: float) -> float:
    """Extra seconds of a rollout beside a tail, during which three quarters of the workers do the
    work."""
    return min(tail_s, seconds * SLOWEST_BESIDE) * TAIL_ENGINES if tail_s > 0.0 else 0.0


def expected_extra(seats: Sequence[Seat], seat: Seat, now: float) -> float:
    """Expected extra seconds of a rollout that starts now beside tails of its group."""
    return extra_beside(seat.seconds(ROLLOUT), _tail_end(seats, seat) - now)


def _tail_end(seats: Sequence[Seat], seat: Seat) -> float:
    """Expected end of the last tail on a rollout's nodes (0 for none)."""
    mask, end = seat.masks[ROLLOUT], 0.0
    for other in seats:
        if other.state is SeatState.RUN_R and not other.busy and other.masks[ROLLOUT] & mask:
            end = max(end, other.expected_end)
    return end


def to_release(seats: Sequence[Seat], reached: Callable[[Seat], bool]) -> list[Seat]:
    """Rollouts that are nearly over (``reached``) and hold nodes for which others wait."""
    waiting = 0
    tails = 0
    for seat in seats:
        if seat.state is SeatState.WAIT_R:
            waiting |= seat.masks[ROLLOUT]
        elif seat.state is SeatState.RUN_R and not seat.busy:
            tails |= seat.masks[ROLLOUT]
    found: list[Seat] = []
    for seat in seats:
        if seat.state is not SeatState.RUN_R or not seat.busy & waiting or not reached(seat):
            continue
        if seat.busy & tails or seat.target < TIGHT:
            continue
        tails |= seat.busy
        found.append(seat)
    return found
