"""Who runs next inside a co-execution group: permit orders, the exact cycle, a small rehearsal.

Nodes of a group are bits, so that a gang is a mask. The scheduler and the rehearsal (stochastic
admission) call the same two orders.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from heapq import heappop, heappush
from typing import Final

import numpy as np

ROLLOUT: Final = 0
TRAIN: Final = 1

WAIT_R: Final = 0
RUN_R: Final = 1
WAIT_T: Final = 2
RUN_T: Final = 3
IDLE_R: Final = 4
"""Between phases: it has not asked for its next rollout yet."""
IDLE_T: Final = 5
AWAY: Final = 6
"""Reserved only: its state is still elsewhere."""
OUT_R: Final = 7
"""Set aside before a rollout: nobody waits for it."""
OUT_T: Final = 8

NEVER: Final = 1e18
"""Seconds."""

_WAITING = (WAIT_R, WAIT_T)
_RUNNING = (RUN_R, RUN_T)
_IDLE = (IDLE_R, IDLE_T)
_ABSENT = (AWAY, OUT_R, OUT_T)


class Seat:
    """A job's place in a group, as far as permits are concerned. Times in seconds.

    ``r`` and ``t`` are expected phases of the whole gangs, and ``stretch`` how much longer they
    take on gangs that shrank; ``target`` is the slowdown to stay under since ``anchor``, ``solo``
    the seconds alone of the iterations finished since; ``rounds`` the next round of either phase;
    after ``late_at`` nobody counts on the end of its phase, or on its asking for the next.
    """

    __slots__ = (
        "anchor",
        "busy",
        "expected_end",
        "index",
        "job",
        "late_at",
        "masks",
        "position",
        "r",
        "rounds",
        "solo",
        "state",
        "stretch",
        "t",
        "target",
    )

    def __init__(
        self,
        job: str,
        masks: tuple[int, int],
        r: float,
        t: float,
        target: float = 1e9,
        stretch: tuple[float, float] = (1.0, 1.0),
    ) -> None:
        self.job = job
        self.masks = masks
        self.r = r
        self.t = t
        self.target = target
        self.stretch = stretch
        self.anchor = 0.0
        self.solo = 0.0
        self.state = WAIT_R
        self.busy = 0
        self.position = 0
        self.rounds = [0, 0]
        self.expected_end = 0.0
        self.late_at = NEVER
        self.index = 0
        """In a rehearsal."""

    def latest_start(self, pool: int) -> float:
        """When the next phase on ``pool`` has to start to stay under the target."""
        deadline = self.anchor + self.target * (self.solo + self.r + self.t)
        left = self.t * self.stretch[1]
        return deadline - (left + self.r * self.stretch[0] if pool == ROLLOUT else left)

    def seconds(self, pool: int) -> float:
        """Expected seconds of a phase."""
        return (self.r if pool == ROLLOUT else self.t) * self.stretch[pool]


_EARLY_S = 20.0
"""Seconds before the latest start from which a delay counts as one."""
_ASKS_S = 5.0
"""Seconds for which a member that has just finished a phase is counted on to ask for the next."""

Order = Callable[[Sequence[Seat], int, float], Seat | None]
"""Picks whom to permit next on a pool at a time, or nobody."""


def _taken(seats: Sequence[Seat], pool: int) -> int:
    running, taken = _RUNNING[pool], 0
    for seat in seats:
        if seat.state == running:
            taken |= seat.busy
    return taken


def round_robin(seats: Sequence[Seat], pool: int, now: float) -> Seat | None:
    """Strictly by (round, position) on every node: nobody passes a member it shares one with."""
    del now
    taken = _taken(seats, pool)
    wanted = _WAITING[pool]
    best: Seat | None = None
    for seat in seats:
        if seat.state != wanted or seat.masks[pool] & taken:
            continue
        if best is not None and _turn(best, pool) < _turn(seat, pool):
            continue
        if not any(
            other.masks[pool] & seat.masks[pool] and _turn(other, pool) < _turn(seat, pool)
            for other in seats
            if other is not seat and other.state not in _ABSENT
        ):
            best = seat
    return best


def _turn(seat: Seat, pool: int) -> tuple[int, int]:
    return seat.rounds[pool], seat.position


def earliest_deadline(seats: Sequence[Seat], pool: int, now: float) -> Seat | None:
    """The waiting member whose phase has to start first.

    A gang that waits for some of its nodes keeps the others, except for phases that are over
    before it can start. A phase is held back for a member that comes soon and would be late
    because of it, if it can afford that itself.
    """
    wanted, running = _WAITING[pool], _RUNNING[pool]
    taken = 0
    waiting: list[Seat] = []
    for seat in seats:
        if seat.state == wanted:
            waiting.append(seat)
        elif seat.state == running:
            taken |= seat.busy
    if all(seat.masks[pool] & taken for seat in waiting):
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
    running, free = _RUNNING[pool], 0.0
    for seat in seats:
        if seat.state == running and seat.busy & mask and seat.expected_end > free:
            free = seat.expected_end
    return free


def _should_hold(seat: Seat, seats: Sequence[Seat], pool: int, now: float) -> bool:
    """Whether the greater lateness of the two is less when a member that comes soon goes first."""
    coming, idle = _RUNNING[1 - pool], _IDLE[pool]
    mask = seat.masks[pool]
    end = now + seat.seconds(pool)
    own = seat.latest_start(pool)
    for other in seats:
        if other.state not in (coming, idle) or not other.masks[pool] & mask:
            continue
        if counted_on_until(other) <= now:
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


def counted_on_until(seat: Seat) -> float:
    """When nobody is held back any more for a member that runs, or was to ask at once."""
    return seat.expected_end + _ASKS_S if seat.state in _IDLE else seat.late_at


def start(seat: Seat, pool: int, now: float) -> None:
    """A member that was picked holds its nodes from now on."""
    seat.state = RUN_R if pool == ROLLOUT else RUN_T
    seat.busy = seat.masks[pool]
    seat.rounds[pool] += 1
    # What is expected, not what it will be: the order must not know the future.
    seat.expected_end = now + seat.seconds(pool)
    seat.late_at = NEVER


def rehearse(
    seats: Sequence[Seat],
    durations: Sequence[Sequence[tuple[float, float]]],
    order: Order,
    *,
    iterations: int = 16,
    switch_s: float = 0.0,
) -> list[float]:
    """Slowdown of each member when the group runs under an order from a common start.

    The first iteration of a member does not count: plans keep a cycle in reserve for it.

    Stops when the members made ``iterations`` each on average and a third of that at least, or
    as soon as somebody is hopelessly late.

    Args:
        durations: rollout and training seconds of each member, used over and over.
        switch_s: added to every phase.

    Returns:
        Elapsed seconds over seconds alone, infinite for who finished nothing.
    """
    for index, seat in enumerate(seats):
        seat.index = index
    heap: list[tuple[float, int]] = []
    count = [0] * len(seats)
    last = [0.0] * len(seats)
    first = [(0.0, 0.0)] * len(seats)
    left = iterations * len(seats)
    least = max(2, iterations // 3)
    waits = [len(seats), 0]
    _grant(seats, durations, order, (0.0, switch_s), heap, count, waits)
    while heap:
        now, index = heappop(heap)
        seat = seats[index]
        if seat.state == RUN_R:
            seat.state = WAIT_T
            waits[TRAIN] += 1
        else:
            pair = durations[index][count[index] % len(durations[index])]
            seat.solo += pair[0] + pair[1]
            seat.state = WAIT_R
            waits[ROLLOUT] += 1
            count[index] += 1
            last[index] = now
            if count[index] == 1:
                first[index] = (now, seat.solo)
            left -= 1
            late = now - seat.target * seat.solo
            if left <= 0 and min(count) >= least:
                break
            if count[index] >= least and late > (pair[0] + pair[1]) * seat.target:
                break
            if left < -8 * iterations * len(seats):
                break
        _grant(seats, durations, order, (now, switch_s), heap, count, waits)
    return [
        (at - since[0]) / (seat.solo - since[1]) if seat.solo > since[1] else float("inf")
        for at, since, seat in zip(last, first, seats, strict=True)
    ]


def _grant(
    seats: Sequence[Seat],
    durations: Sequence[Sequence[tuple[float, float]]],
    order: Order,
    clock: tuple[float, float],
    heap: list[tuple[float, int]],
    count: list[int],
    waits: list[int],
) -> None:
    now, switch_s = clock
    for pool in (ROLLOUT, TRAIN):
        while waits[pool] and (seat := order(seats, pool, now)) is not None:
            index = seat.index
            seconds = durations[index][count[index] % len(durations[index])][pool]
            start(seat, pool, now)
            waits[pool] -= 1
            heappush(heap, (now + seconds * seat.stretch[pool] + switch_s, index))


def formula_holds(members: Sequence[Seat]) -> bool:
    """Whether rollout sets are equal or disjoint and there is one shared training unit."""
    if len({seat.masks[TRAIN] for seat in members}) > 1:
        return False
    masks = {seat.masks[ROLLOUT] for seat in members}
    return sum(mask.bit_count() for mask in masks) == _union(masks).bit_count()


def _union(masks: set[int]) -> int:
    union = 0
    for mask in masks:
        union |= mask
    return union


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
        for pool in (ROLLOUT, TRAIN):
            for bit in bits(seat.masks[pool]):
                loads[pool, bit] = loads.get((pool, bit), 0.0) + seat.seconds(pool)
    return max(
        [seat.seconds(ROLLOUT) + seat.seconds(TRAIN) for seat in members] + list(loads.values())
    )


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
    for pool in (ROLLOUT, TRAIN):
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
