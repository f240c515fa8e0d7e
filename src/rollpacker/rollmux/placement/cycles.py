"""Who runs next inside a co-execution group: permit orders, and the exact cycle.

The scheduler and the rehearsal (stochastic admission) call the same two orders.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from operator import or_

import numpy as np

from rollpacker.rollmux.model.seat import (
    ABSENT,
    IDLE,
    POOLS,
    ROLLOUT,
    RUNNING,
    TRAIN,
    WAITING,
    Seat,
)

_EARLY_S = 20.0
"""Seconds before the latest start from which a delay counts as one."""

Order = Callable[[Sequence[Seat], int, float], Seat | None]
"""Picks whom to permit next on a pool at a time, or nobody."""


def _taken(seats: Sequence[Seat], pool: int) -> int:
    running, taken = RUNNING[pool], 0
    for seat in seats:
        if seat.state is running:
            taken |= seat.busy
    return taken


def round_robin(seats: Sequence[Seat], pool: int, now: float) -> Seat | None:
    """Strictly by (round, position) on every node: nobody passes a member it shares one with."""
    del now
    taken = _taken(seats, pool)
    wanted = WAITING[pool]
    best: Seat | None = None
    for seat in seats:
        mask = seat.masks[pool]
        if seat.state is not wanted or mask & taken:
            continue
        turn = seat.turn(pool)
        if best is not None and best.turn(pool) < turn:
            continue
        if not any(
            other.masks[pool] & mask and other.turn(pool) < turn and other.state not in ABSENT
            for other in seats
            if other is not seat
        ):
            best = seat
    return best


def earliest_deadline(seats: Sequence[Seat], pool: int, now: float) -> Seat | None:
    """The waiting member whose phase has to start first.

    A gang that waits for some of its nodes keeps the others, except for phases that are over
    before it can start. A phase is held back for a member that comes soon and would be late
    because of it, if it can afford that itself. Nobody uses a node of a member that has to be
    alone for its promise.
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
    """Whether the greater lateness of the two is less when a member that comes soon goes first."""
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


def formula_holds(members: Sequence[Seat]) -> bool:
    """Whether rollout sets are equal or disjoint and there is one shared training unit."""
    if len({seat.masks[TRAIN] for seat in members}) > 1:
        return False
    masks = {seat.masks[ROLLOUT] for seat in members}
    return sum(mask.bit_count() for mask in masks) == reduce(or_, masks, 0).bit_count()


def bits(mask: int) -> Iterator[int]:
    """The nodes of a gang."""
    while mask:
        low = mask & -mask
        yield low
        mask ^= low


def load_bound(members: Sequence[Seat]) -> float:
    """The formula: the longest iteration alone, or the most loaded node. A lower bound always."""
    loads: dict[tuple[int, int], float] = {}
    for seat in members:
        for pool in POOLS:
            for bit in bits(seat.masks[pool]):
                loads[pool, bit] = loads.get((pool, bit), 0.0) + seat.seconds(pool)
    return max([seat.iteration_s for seat in members] + list(loads.values()))


def cycle(members: Sequence[Seat]) -> float:
    """Seconds of a meta-iteration under round-robin in this order, exactly."""
    return load_bound(members) if formula_holds(members) else max_plus_cycle(members)


def max_plus_cycle(members: Sequence[Seat]) -> float:
    """The growth rate of the max-plus recursion: Karp's maximum cycle mean."""
    step = _one_round(members)
    size = len(step)
    walks = [np.zeros(size)]
    for _ in range(size):
        walks.append(np.max(step + walks[-1][None, :], axis=1))
    lengths = np.arange(size, 0, -1)[:, None]
    with np.errstate(invalid="ignore"):
        means = (walks[size][None, :] - np.array(walks[:size])) / lengths
    return float(np.max(np.min(means, axis=0)))


def _one_round(members: Sequence[Seat]) -> np.ndarray:
    """``A`` in ``ends' = A ⊗ ends``; ends of all rollouts, then of all trainings."""
    count = len(members)
    now = np.full((2 * count, 2 * count), -np.inf)
    np.fill_diagonal(now, 0.0)
    fresh = now.copy()
    for pool in POOLS:
        last: dict[int, int] = {}
        for index in reversed(range(count)):
            for bit in bits(members[index].masks[pool]):
                last.setdefault(bit, index)
        for index, seat in enumerate(members):
            own = now[count + index] if pool == ROLLOUT else fresh[index]
            ready = own.copy()
            for bit in bits(seat.masks[pool]):
                before = last[bit]
                rows = fresh if before < index else now
                ready = np.maximum(ready, rows[pool * count + before])
                last[bit] = index
            fresh[pool * count + index] = ready + seat.seconds(pool)
    return fresh
