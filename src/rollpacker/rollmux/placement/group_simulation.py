"""Simulates a group with the scheduler's permit order and tail rule, on observed durations."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from heapq import heappop, heappush

from rollpacker.rollmux.model.seat import ROLLOUT, RUNNING, TRAIN, Seat
from rollpacker.rollmux.model.tail_model import (
    TAIL_COST,
    TAIL_TIME,
    expected_extra,
    extra_beside,
    to_release,
)
from rollpacker.rollmux.placement.permit_order import earliest_deadline

ITERATIONS = 16  # mean iterations per member

_IN_TURN = (TRAIN, ROLLOUT)  # pools in the order in which permits are handed out


def rehearse(
    seats: Sequence[Seat],
    durations: Sequence[Sequence[tuple[float, float]]],
    *,
    switch_s: float = 0.0,
    tails: Collection[str] = (),
) -> list[float]:
    """Simulated slowdown of each member when the group runs from a common start.

    The first iteration does not count, since plans reserve a cycle for it. The simulation stops
    after ``ITERATIONS`` per member on average and a third of that for each, or when a member is
    hopelessly late.

    Args:
        durations: rollout and training seconds of each member, repeated as needed.
        switch_s: seconds added to every phase.
        tails: jobs that leave most of their nodes when their tails begin.

    Returns:
        Elapsed seconds over seconds alone (infinite if nothing was finished).
    """
    actors = [
        _Actor(number, seat, each, seat.job in tails)
        for number, (seat, each) in enumerate(zip(seats, durations, strict=True))
    ]
    return _Rehearsal(actors, switch_s).run()


class _Actor:
    __slots__ = (
        "_durations",
        "_first",
        "_last",
        "began",
        "count",
        "end",
        "leaves_tail",
        "number",
        "seat",
        "tail_reached",
        "version",
    )

    def __init__(
        self,
        number: int,
        seat: Seat,
        durations: Sequence[tuple[float, float]],
        leaves_tail: bool,
    ) -> None:
        self.number = number
        self.seat = seat
        self.leaves_tail = leaves_tail
        self.tail_reached = False
        self.began = self.end = 0.0
        self.count = self.version = 0
        self._durations = durations
        self._first = (0.0, 0.0)
        self._last = 0.0

    def seconds(self, pool: int) -> float:
        return self._durations[self.count % len(self._durations)][pool]

    def iterate(self, now: float) -> float:
        """Finish an iteration. Returns its seconds alone."""
        seat = self.seat
        solo_s = sum(self._durations[self.count % len(self._durations)])
        seat.learn(solo_s, (seat.r, seat.t))
        self.count += 1
        self._last = now
        if self.count == 1:
            self._first = (now, seat.solo)
        return solo_s

    def slowdown(self) -> float:
        at, solo = self._first
        alone = self.seat.solo - solo
        return (self._last - at) / alone if alone > 0.0 else float("inf")


class _Rehearsal:
    def __init__(self, actors: Sequence[_Actor], switch_s: float) -> None:
        self._actors = actors
        self._seats = [actor.seat for actor in actors]
        self._of = {actor.seat: actor for actor in actors}
        self._switch_s = switch_s
        self._tails = any(actor.leaves_tail for actor in actors)
        self._waits = [len(actors), 0]
        self._heap: list[tuple[float, int, int, bool]] = []
        """Time, member, phase (``_Actor.version``), and whether it is the start of the tail."""

    def run(self) -> list[float]:
        actors = self._actors
        left = ITERATIONS * len(actors)
        hopeless = -8 * left
        least = ITERATIONS // 3
        self._grant(0.0)
        while self._heap:
            now, number, version, tail = heappop(self._heap)
            actor = actors[number]
            if version != actor.version:
                continue
            if tail:
                actor.tail_reached = True
            else:
                seat = actor.seat
                pool = ROLLOUT if seat.state is RUNNING[ROLLOUT] else TRAIN
                if pool == TRAIN:
                    solo_s = actor.iterate(now)
                    left -= 1
                    if left <= 0 and min(each.count for each in actors) >= least:
                        break
                    late = now - seat.target * seat.solo
                    if actor.count >= least and late > solo_s * seat.target:
                        break
                    if left < hopeless:
                        break
                seat.go_on(pool)
                self._waits[1 - pool] += 1
                self._grant(now)
            if self._tails and self._waits[ROLLOUT]:
                self._release(now)
        return [actor.slowdown() for actor in actors]

    def _grant(self, now: float) -> None:
        seats = self._seats
        for pool in _IN_TURN:
            while self._waits[pool] and (seat := earliest_deadline(seats, pool, now)) is not None:
                self._waits[pool] -= 1
                self._start(self._of[seat], pool, now)

    def _start(self, actor: _Actor, pool: int, now: float) -> None:
        seconds = actor.seconds(pool) + self._switch_s
        seat, beside_s = actor.seat, 0.0
        if pool == ROLLOUT and self._tails:
            seconds += extra_beside(seconds, self._tail_end(seat) - now)
            beside_s = expected_extra(self._seats, seat, now)
        seat.start(pool, now, beside_s=beside_s)
        actor.version += 1
        actor.began, actor.end = now, now + seconds
        heappush(self._heap, (actor.end, actor.number, actor.version, False))
        if pool == ROLLOUT and actor.leaves_tail:
            actor.tail_reached = False
            at = now + TAIL_TIME * seconds
            heappush(self._heap, (at, actor.number, actor.version, True))

    def _tail_end(self, seat: Seat) -> float:
        mask, running = seat.masks[ROLLOUT], RUNNING[ROLLOUT]
        return max(
            (
                other.end
                for other in self._actors
                if other.seat.state is running
                and not other.seat.busy
                and other.seat.masks[ROLLOUT] & mask
            ),
            default=0.0,
        )

    def _release(self, now: float) -> None:
        found = to_release(self._seats, lambda seat: self._of[seat].tail_reached)
        for seat in found:
            actor = self._of[seat]
            seat.leave_to_tail(TAIL_COST)
            actor.version += 1
            actor.end += TAIL_COST * (actor.end - actor.began)
            heappush(self._heap, (actor.end, actor.number, actor.version, False))
        if found:
            self._grant(now)
