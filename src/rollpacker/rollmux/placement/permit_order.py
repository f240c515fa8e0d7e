"""The permit order inside a co-execution group, for the scheduler and the group simulation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rollpacker.rollmux.model.seat import (
    IDLE,
    POOLS,
    RUNNING,
    WAITING,
    Seat,
)

_EARLY_S = 20.0  # seconds before the latest start from which a delay counts


def earliest_deadline(seats: Sequence[Seat], pool: int, now: float) -> Seat | None:
    """The waiting member whose phase must start first.

    A gang that waits for some of its nodes keeps the others, except for phases that end before it
    can start. A phase waits for a member that comes soon and would be late otherwise, if the phase
    can afford it. Nobody uses a node of a member that must be alone for its SLO.
    """
    wanted, running = WAITING[pool], RUNNING[pool]
    taken = 0
    waiting: list[Seat] = []
    alone = 0
    for seat in seats:
        if seat.state is wanted:
            waiting.append(seat)
        elif seat.state is running:
            taken |= seat.busy
        if seat.alone and (seat.state in WAITING or seat.counted_on_until() > now):
            alone |= seat.masks[pool]
    if alone:
        waiting = [seat for seat in waiting if seat.alone or not seat.masks[pool] & alone]
    for seat in waiting:
        if not seat.masks[pool] & taken:
            break
    else:
        return None
    if len(waiting) > 1:
        waiting.sort(key=lambda seat: (seat.latest_start(pool), seat.position))
    return _first_free(waiting, seats, pool, now, taken)


def _first_free(
    waiting: list[Seat], seats: Sequence[Seat], pool: int, now: float, taken: int
) -> Seat | None:
    kept: list[tuple[int, float]] = []
    last = waiting[-1]
    for seat in waiting:
        mask = seat.masks[pool]
        if mask & taken:
            if seat is not last:
                kept.append((mask, _free_at(seats, pool, mask)))
            continue
        if kept:
            end = now + seat.seconds(pool)
            if any(mask & other and end > free for other, free in kept):
                kept.append((mask, end))
                continue
        if not _should_hold(seat, seats, pool, now):
            return seat
    return None


def _free_at(seats: Sequence[Seat], pool: int, mask: int) -> float:
    running, free = RUNNING[pool], 0.0
    for seat in seats:
        if seat.state is running and seat.busy & mask and seat.expected_end > free:
            free = seat.expected_end
    return free


def _should_hold(seat: Seat, seats: Sequence[Seat], pool: int, now: float) -> bool:
    """Whether letting a member that comes soon go first reduces the greater lateness of the two."""
    coming, idle = RUNNING[1 - pool], IDLE[pool]
    mask = seat.masks[pool]
    end = now + seat.seconds(pool)
    own = seat.latest_start(pool)
    for other in seats:
        if (other.state is not coming and other.state is not idle) or not other.masks[pool] & mask:
            continue
        if other.counted_on_until() <= now:
            continue
        ready = max(other.expected_end, now)
        if ready >= end:
            continue
        its = other.latest_start(pool)
        at_once = max(end - its, now - own)
        if at_once <= -_EARLY_S:
            continue
        if max(ready - its, ready + other.seconds(pool) - own) < at_once:
            return True
    return False


def bits(mask: int) -> Iterator[int]:
    """The nodes of a gang, each as a mask."""
    while mask:
        low = mask & -mask
        yield low
        mask ^= low


def load_bound(members: Sequence[Seat]) -> float:
    """Lower bound of a group's cycle: the longest iteration alone, or the most loaded node."""
    loads: dict[tuple[int, int], float] = {}
    for seat in members:
        for pool in POOLS:
            for bit in bits(seat.masks[pool]):
                loads[pool, bit] = loads.get((pool, bit), 0.0) + seat.seconds(pool)
    return max([seat.iteration_s for seat in members] + list(loads.values()))
