"""A job's seat in a co-execution group: its state, its nodes and its SLO."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final

ROLLOUT: Final = 0
TRAIN: Final = 1
POOLS: Final = (ROLLOUT, TRAIN)

NEVER: Final = 1e18

ASKS_S: Final = 5.0
"""Seconds for which plans expect a member to ask for its next phase after the last one."""


class SeatState(IntEnum):
    """State of a member. R stands for rollout, T for training.

    Databases hold these numbers, so never reuse one for another state.
    """

    WAIT_R = 0
    RUN_R = 1
    IDLE_T = 2  # it has not asked for its training yet
    WAIT_T = 3
    RUN_T = 4
    IDLE_R = 5
    AWAY = 8  # reserved: its state is still elsewhere


WAITING: Final = (SeatState.WAIT_R, SeatState.WAIT_T)
RUNNING: Final = (SeatState.RUN_R, SeatState.RUN_T)
IDLE: Final = (SeatState.IDLE_R, SeatState.IDLE_T)  # indexed by pool

_BEFORE_TRAINING = (SeatState.WAIT_R, SeatState.RUN_R, SeatState.IDLE_R)
_PROGRESS = {
    SeatState.RUN_T: 0,
    SeatState.WAIT_T: 1,
    SeatState.IDLE_T: 1,
    SeatState.RUN_R: 2,
    SeatState.WAIT_R: 3,
    SeatState.IDLE_R: 3,
}
"""Progress in an iteration. The furthest has the lowest number."""


@dataclass(slots=True, eq=False)
class Seat:
    """A job's place in a group, for permits. Times in seconds.

    The nodes of a group are bits and a gang is a mask. Only these methods change a seat.

    Args:
        masks: its gang of each pool.
        r, t: expected rollout and training seconds of the whole gang.
        target: slowdown limit since ``anchor``.
        solo: seconds alone of the iterations finished since ``anchor``.
        busy: nodes that it holds.
        running_since: start of the running or last phase.
        expected_end: expected end of the phase, tail cost included. When idle, the end of the last.
        late_at: after this time plans expect neither the end of its phase nor its next request.
        alone: whether others on its nodes must wait to save its SLO.
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
        """Pool of the phase that it runs, waits for or must ask for."""
        return ROLLOUT if self.state in _BEFORE_TRAINING else TRAIN

    @property
    def progress(self) -> tuple[int, int]:
        return _PROGRESS[self.state], self.position

    def seconds(self, pool: int) -> float:
        return self.r if pool == ROLLOUT else self.t

    @property
    def iteration_s(self) -> float:
        return self.seconds(ROLLOUT) + self.seconds(TRAIN)

    def latest_start(self, pool: int) -> float:
        """Latest start of the next phase on ``pool`` that stays under the target."""
        deadline = self.anchor + self.target * (self.solo + self.r + self.t)
        return deadline - (self.r + self.t if pool == ROLLOUT else self.t)

    def counted_on_until(self) -> float:
        """Time until which others are held back for it."""
        return self.expected_end + ASKS_S if self.state in IDLE else self.late_at

    def reserve(self, target: float) -> None:
        self.state = SeatState.AWAY
        self.target = target

    def arrive(self, asked: bool, late_at: float) -> None:
        """Its job is here between two iterations. ``asked`` if it wants a rollout already."""
        self.state = SeatState.WAIT_R if asked else SeatState.IDLE_R
        self.late_at = late_at

    def ask(self) -> None:
        self.state = WAITING[self.pool]

    def start(
        self, pool: int, now: float, late_at: float = NEVER, *, beside_s: float = 0.0
    ) -> None:
        """Take its nodes and run, ``beside_s`` seconds longer beside a tail."""
        self.state = RUNNING[pool]
        self.busy = self.masks[pool]
        # Use expected times: the order must not know the future.
        self.running_since = now
        self.expected_end = now + self.seconds(pool) + beside_s
        self.late_at = late_at

    def leave_to_tail(self, cost: float) -> None:
        """Release its nodes. The rollout takes ``cost`` of its time longer."""
        self.busy = 0
        self.expected_end += cost * (self.expected_end - self.running_since)

    def finish(self, pool: int, now: float, late_at: float = NEVER) -> None:
        self.state = IDLE[1 - pool]
        self.busy = 0
        self.expected_end = now
        self.late_at = late_at

    def go_on(self, pool: int) -> None:
        self.state = WAITING[1 - pool]
        self.busy = 0

    def lose(self) -> None:
        self.state = IDLE[self.pool]
        self.busy = 0

    def go_alone(self, alone: bool) -> None:
        self.alone = alone

    def learn(self, solo_s: float, expected: tuple[float, float]) -> None:
        self.solo += solo_s
        self.r, self.t = expected

    def order(self, position: int) -> None:
        self.position = position

    def promise(self, target: float, since: float) -> None:
        """Set a slowdown limit from ``since`` on."""
        self.target, self.anchor, self.solo = target, since, 0.0
