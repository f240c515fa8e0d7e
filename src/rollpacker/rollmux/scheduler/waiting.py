"""Who waits for whom in a group, and until when.

A member that has lost its permit, has nothing left to do, or does not ask for its next phase is set
aside: under round-robin the others would wait for it for ever. It is back as soon as it asks.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush

from rollpacker.rollmux.model.cluster import Group, Job
from rollpacker.rollmux.model.member import IDLE, NEVER, ROLLOUT, RUNNING, WAITING, Seat
from rollpacker.rollmux.model.settings import Settings
from rollpacker.rollmux.model.tail_model import SLOWEST_BESIDE


def due(job: Job, seat: Seat, pool: int, now: float, settings: Settings) -> float:
    """When a phase that starts now has to be over, unless its job promised too much."""
    worst = job.spec.worst_rollout_s if pool == ROLLOUT else job.spec.worst_train_s
    longest = max(worst * seat.stretch[pool], seat.seconds(pool))
    return now + settings.warm_s + longest * SLOWEST_BESIDE


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
        if any(seat.state in WAITING for seat in seats):
            times = [at for seat in seats if (at := self._until(seat)) > now]
            if times:
                self._times[group.id] = min(times)
                heappush(self._heap, (self._times[group.id], group.id))

    def _until(self, seat: Seat) -> float:
        """Until when a member keeps others waiting; long ago where it does not."""
        if self._in_turn:
            return seat.late_at if seat.state in IDLE else -NEVER
        return seat.counted_on_until() if seat.state in (*IDLE, *RUNNING) else -NEVER

    def times(self) -> list[tuple[int, float]]:
        """Groups and their times, to ``restore`` them."""
        return sorted(self._times.items())

    def restore(self, times: Iterable[tuple[int, float]]) -> None:
        """Take up the times of a snapshot; nothing was noted yet."""
        for group, at in times:
            self._times[group] = at
            heappush(self._heap, (at, group))

    def next(self) -> float:
        """The first time; ``seat.NEVER`` for none."""
        while self._heap and self._times.get(self._heap[0][1]) != self._heap[0][0]:
            heappop(self._heap)
        return self._heap[0][0] if self._heap else NEVER

    def take(self, now: float) -> list[int]:
        """Groups whose time has come."""
        due: list[int] = []
        while self.next() <= now:
            due.append(heappop(self._heap)[1])
            del self._times[due[-1]]
        return due
