"""Turns inside a group: their order after a change, and members that keep the others waiting.

A member that has lost its permit, has nothing left to do, or does not ask for its next phase is set
aside: under round-robin the others would wait for it for ever. It is back as soon as it asks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from heapq import heappop, heappush
from typing import Final

from rollpacker.policy.tail_release import TAIL_WORKERS
from rollpacker.rollmux import interleave as il
from rollpacker.rollmux.cluster import Group, Job
from rollpacker.rollmux.interleave import Seat
from rollpacker.rollmux.settings import Settings

_PROGRESS = {il.RUN_T: 0, il.WAIT_T: 1, il.IDLE_T: 1, il.RUN_R: 2, il.WAIT_R: 3, il.IDLE_R: 3}
_ROUNDS = {
    il.RUN_T: (1, 1),
    il.WAIT_T: (1, 0),
    il.IDLE_T: (1, 0),
    il.RUN_R: (1, 0),
    il.WAIT_R: (0, 0),
    il.IDLE_R: (0, 0),
}
ASK: Final = {
    "rollout": (il.WAIT_R, il.IDLE_R, il.OUT_R),
    "train": (il.WAIT_T, il.IDLE_T, il.OUT_T),
}
"""Of a phase: waiting for it, about to ask for it, and set aside before it."""
_IDLE = (il.IDLE_R, il.IDLE_T)
_WAITING = (il.WAIT_R, il.WAIT_T)
_RUNNING = (il.RUN_R, il.RUN_T)
_BESIDE_A_TAIL = 1.0 / (1.0 - TAIL_WORKERS)
"""A rollout that starts on the workers that a tail has left takes so much longer at most."""


def reorder(seats: Iterable[Seat]) -> list[Seat]:
    """Rounds from zero; who is furthest in its iteration comes first. Those who take part."""
    found = [seat for seat in seats if seat.state in _ROUNDS]
    found.sort(key=lambda seat: (_PROGRESS[seat.state], seat.position))
    for position, seat in enumerate(found):
        seat.position = position
        seat.rounds = list(_ROUNDS[seat.state])
    return found


def set_aside(seat: Seat, group: Group) -> None:
    """Nobody waits for an idle member any more; when it is back it is the last of its kind."""
    seat.state = il.OUT_R if seat.state == il.IDLE_R else il.OUT_T
    seat.position = len(group.seats)


def due(job: Job, seat: Seat, pool: int, now: float, settings: Settings) -> float:
    """When a phase that starts now has to be over, unless its job promised too much."""
    worst = job.spec.worst_rollout_s if pool == il.ROLLOUT else job.spec.worst_train_s
    longest = max(worst * seat.stretch[pool], seat.seconds(pool))
    return now + settings.warm_s + longest * _BESIDE_A_TAIL


def silent(seats: Sequence[Seat], now: float) -> list[Seat]:
    """Members that should have asked for their next phase by now."""
    return [seat for seat in seats if seat.state in _IDLE and seat.late_at <= now]


class Looks:
    """When those who wait in a group may go on though nothing happened.

    Args:
        in_turn: round-robin: members that do not ask keep the others waiting. Else members that
            are to come soon do.
    """

    def __init__(self, in_turn: bool) -> None:
        self._in_turn = in_turn
        self._times: dict[int, float] = {}
        self._heap: list[tuple[float, int]] = []
        """Times as they were noted; those that do not count any more are passed over."""

    def note(self, group: Group, now: float) -> None:
        """A group has changed."""
        seats = group.seats
        self._times.pop(group.id, None)
        if any(seat.state in _WAITING for seat in seats):
            times = [at for seat in seats if (at := self._until(seat)) > now]
            if times:
                self._times[group.id] = min(times)
                heappush(self._heap, (self._times[group.id], group.id))

    def _until(self, seat: Seat) -> float:
        """Until when a member keeps others waiting; long ago where it does not."""
        if self._in_turn:
            return seat.late_at if seat.state in _IDLE else -il.NEVER
        return il.counted_on_until(seat) if seat.state in (*_IDLE, *_RUNNING) else -il.NEVER

    def next(self) -> float:
        """The first time; ``interleave.NEVER`` for none."""
        while self._heap and self._times.get(self._heap[0][1]) != self._heap[0][0]:
            heappop(self._heap)
        return self._heap[0][0] if self._heap else il.NEVER

    def take(self, now: float) -> list[int]:
        """Groups whose time has come."""
        due: list[int] = []
        while self.next() <= now:
            due.append(heappop(self._heap)[1])
            del self._times[due[-1]]
        return due


def next_pass(group: Group, seat: Seat, pool: int) -> int:
    """The round of a permit under deadlines: they count passes over the positions."""
    last_round, last_position = group.last[pool]
    number = last_round + (seat.position <= last_position)
    group.last[pool] = (number, seat.position)
    return number


def tails_to_release(group: Group, jobs: Mapping[str, Job], lifetime: bool) -> list[Seat]:
    """Rollouts that are nearly over and whose nodes somebody waits for."""
    waiting = 0
    tails = 0
    for seat in group.seats:
        if seat.state == il.WAIT_R:
            waiting |= seat.masks[il.ROLLOUT]
        elif seat.state == il.RUN_R and not seat.busy:
            tails |= seat.masks[il.ROLLOUT]
    found: list[Seat] = []
    for seat in group.seats:
        reached = jobs[seat.job].tail_reached
        if seat.state != il.RUN_R or not reached or not seat.busy & waiting:
            continue
        if seat.busy & tails or (lifetime and seat.target < 1.05):
            continue
        tails |= seat.busy
        found.append(seat)
    return found
