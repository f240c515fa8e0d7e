"""Tails: the last responses of a rollout, which leave most of its nodes to the next job.

The scheduler, the rehearsal of groups and the simulated cluster share these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rollpacker.policy.engines.fleet import TAIL_ENGINES
from rollpacker.rollmux.model.seat import ROLLOUT, Seat, SeatState

TAIL_TIME = 0.70
"""Share of a rollout's time after which about 80% of its responses are done."""
TAIL_COST = 0.02
"""A rollout whose tail moved takes so much longer."""
SLOWEST_BESIDE = 1.0 / (1.0 - TAIL_ENGINES)
"""A rollout that starts on the workers that a tail has left takes so much longer at most."""
HELD = TAIL_TIME + (1.0 + TAIL_COST - TAIL_TIME) * TAIL_ENGINES
"""Share of a rollout's time for which it holds its nodes, where its tail leaves most of them."""
TIGHT = 1.05
"""A rollout does not leave its tail, which takes longer then, under a target below this."""


def extra_beside(seconds: float, tail_s: float) -> float:
    """What a rollout of ``seconds`` takes longer where a tail goes on for ``tail_s``: till then
    three quarters of the workers do the work."""
    return min(tail_s, seconds * SLOWEST_BESIDE) * TAIL_ENGINES if tail_s > 0.0 else 0.0


def expected_extra(seats: Sequence[Seat], seat: Seat, now: float) -> float:
    """What a rollout that starts now is expected to take longer beside tails of its group."""
    return extra_beside(seat.seconds(ROLLOUT), _tail_end(seats, seat) - now)


def _tail_end(seats: Sequence[Seat], seat: Seat) -> float:
    """When the last tail on the nodes of a rollout is expected to be over; 0 for none."""
    mask, end = seat.masks[ROLLOUT], 0.0
    for other in seats:
        if other.state is SeatState.RUN_R and not other.busy and other.masks[ROLLOUT] & mask:
            end = max(end, other.expected_end)
    return end


def to_release(seats: Sequence[Seat], reached: Callable[[Seat], bool]) -> list[Seat]:
    """Rollouts that are nearly over and whose nodes somebody waits for.

    Args:
        seats: of a group.
        reached: whether about 80% of a rollout's responses are there.
    """
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
