"""A job's seat in a co-execution group: what it is doing, and what it was promised."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final

ROLLOUT: Final = 0
TRAIN: Final = 1
POOLS: Final = (ROLLOUT, TRAIN)

NEVER: Final = 1e18
"""Seconds."""

ASKS_S: Final = 5.0
"""Seconds for which a member that has just finished a phase is counted on to ask for the next."""


class SeatState(IntEnum):
    """What a member does, between one rollout and the next; R is of rollouts, T of training.

    Databases hold these numbers: one that is given to another state would be misread after an
    upgrade.
    """

    WAIT_R = 0
    RUN_R = 1
    IDLE_T = 2
    """It has not asked for its training yet."""
    WAIT_T = 3
    RUN_T = 4
    IDLE_R = 5
    AWAY = 8
    """Reserved only: its state is still elsewhere."""


WAITING: Final = (SeatState.WAIT_R, SeatState.WAIT_T)
RUNNING: Final = (SeatState.RUN_R, SeatState.RUN_T)
IDLE: Final = (SeatState.IDLE_R, SeatState.IDLE_T)
"""These three by pool."""

_BEFORE_TRAINING = (SeatState.WAIT_R, SeatState.RUN_R, SeatState.IDLE_R)
_PROGRESS = {
    SeatState.RUN_T: 0,
    SeatState.WAIT_T: 1,
    SeatState.IDLE_T: 1,
    SeatState.RUN_R: 2,
    SeatState.WAIT_R: 3,
    SeatState.IDLE_R: 3,
}
"""Place in an iteration, the furthest first."""


@dataclass(slots=True, eq=False)
class Seat:
    """A job's place in a group, as far as permits are concerned. Times in seconds.

    Nodes of a group are bits, so that a gang is a mask. Only these methods change a seat.

    Args:
        masks: its gangs of either pool.
        r: expected rollout of the whole gang.
        t: the same of training.
        target: the slowdown to stay under since ``anchor``.
        anchor: since when the slowdown counts.
        solo: seconds alone of the iterations finished since then.
        busy: the nodes that it holds while it runs.
        position: its place in the order of the group.
        running_since: of its phase, or of its last one.
        expected_end: of its phase, with what tails cost it; of the last one while it is idle.
        late_at: after this nobody counts on the end of its phase, or on its asking for the next.
        alone: whether those who share its nodes have to wait, or its promise is lost.
    """

    job: str
    masks: tuple[int, int]
    r: float
    t: float
    target: float = 1e9
    anchor: float = 0.0
    solo: float = 0.0
    state: SeatState = SeatState.WAIT_R
    busy: int = 0
    position: int = 0
    running_since: float = 0.0
    expected_end: float = 0.0
    late_at: float = NEVER
    alone: bool = False

    @property
    def pool(self) -> int:
        """Of the phase that it runs, waits for or has to ask for."""
        return ROLLOUT if self.state in _BEFORE_TRAINING else TRAIN

    @property
    def progress(self) -> tuple[int, int]:
        """To sort members by that are here: who is furthest in its iteration comes first."""
        return _PROGRESS[self.state], self.position

    def seconds(self, pool: int) -> float:
        """Expected seconds of a phase."""
        return self.r if pool == ROLLOUT else self.t

    @property
    def iteration_s(self) -> float:
        """Expected seconds of both phases, one after the other."""
        return self.seconds(ROLLOUT) + self.seconds(TRAIN)

    def latest_start(self, pool: int) -> float:
        """When the next phase on ``pool`` has to start to stay under the target."""
        deadline = self.anchor + self.target * (self.solo + self.r + self.t)
        return deadline - (self.r + self.t if pool == ROLLOUT else self.t)

    def counted_on_until(self) -> float:
        """When nobody is held back any more for a member that runs, or was to ask at once."""
        return self.expected_end + ASKS_S if self.state in IDLE else self.late_at

    def reserve(self, target: float) -> None:
        self.state = SeatState.AWAY
        self.target = target

    def arrive(self, asked: bool, late_at: float) -> None:
        """Its job is here, between two iterations; it may have asked for a rollout on its way."""
        self.state = SeatState.WAIT_R if asked else SeatState.IDLE_R
        self.late_at = late_at

    def ask(self) -> None:
        """It is ready for its next phase."""
        self.state = WAITING[self.pool]

    def start(
        self, pool: int, now: float, late_at: float = NEVER, *, beside_s: float = 0.0
    ) -> None:
        """It was picked, and holds its nodes from now on; ``beside_s`` longer beside a tail."""
        self.state = RUNNING[pool]
        self.busy = self.masks[pool]
        # What is expected, not what it will be: the order must not know the future.
        self.running_since = now
        self.expected_end = now + self.seconds(pool) + beside_s
        self.late_at = late_at

    def leave_to_tail(self, cost: float) -> None:
        """Its rollout goes on, ``cost`` of its time longer, on nodes that others may have."""
        self.busy = 0
        self.expected_end += cost * (self.expected_end - self.running_since)

    def finish(self, pool: int, now: float, late_at: float = NEVER) -> None:
        """A phase is over; it may ask for the other one."""
        self.state = IDLE[1 - pool]
        self.busy = 0
        self.expected_end = now
        self.late_at = late_at

    def go_on(self, pool: int) -> None:
        """A phase is over, and it asks for the other one at once."""
        self.state = WAITING[1 - pool]
        self.busy = 0

    def lose(self) -> None:
        """It lost its permit, and has to ask for the same phase again."""
        self.state = IDLE[self.pool]
        self.busy = 0

    def go_alone(self, alone: bool) -> None:
        """Others on its nodes have to wait from now on, or not any more."""
        self.alone = alone

    def learn(self, solo_s: float, expected: tuple[float, float]) -> None:
        """An iteration is over: it took ``solo_s`` alone, and the next ones are expected."""
        self.solo += solo_s
        self.r, self.t = expected

    def order(self, position: int) -> None:
        self.position = position

    def promise(self, target: float, since: float) -> None:
        """A slowdown to stay under from now on."""
        self.target, self.anchor, self.solo = target, since, 0.0
