"""The programs of jobs: their starts, their ends, and whether they start again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from rollpacker.rollmux.model.program import JobProgram

_KEPT = 20
MOST_NODES_LOST = 3  # a job ends after so many node failures in a row under its program
_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
"""First and longest pause before a failed program restarts. It doubles in between."""

Outcome = Literal["", "done", "failed", "stopped"]


@dataclass(slots=True)
class ProgramRun:
    """One start of a program. Times are seconds on the cluster's clock.

    Args:
        number: 1, 2, 3, ...
        members: the job's other nodes with processes of the program.
        code: exit code (None while it runs, or if its node failed).
        lost: members that have failed.
        broken: whether a member's process failed, so that the attempt must end.
    """

    number: int
    node: str
    members: tuple[str, ...]
    began: float
    ended: float | None = None
    code: int | None = None
    lost: tuple[str, ...] = ()
    broken: bool = False

    @property
    def nodes(self) -> tuple[str, ...]:
        return (self.node, *self.members)

    @property
    def left(self) -> list[str]:
        return [node for node in self.nodes if node not in self.lost]


@dataclass(slots=True)
class ProgramRuns:
    """A job's program and its last attempts.

    Args:
        used: restarts since the job's last finished iteration.
        done: iterations of the job at the last of these restarts.
        nodes_lost: nodes that failed under it since then.
    """

    program: JobProgram
    attempts: list[ProgramRun] = field(default_factory=list[ProgramRun])
    used: int = 0
    done: int = 0
    outcome: Outcome = ""
    nodes_lost: int = 0

    @property
    def running(self) -> ProgramRun | None:
        """The attempt that is not known to have ended."""
        last = self.attempts[-1] if self.attempts else None
        return last if last is not None and last.ended is None else None

    def ready_at(self) -> float | None:
        """Earliest next start (None for never, or while it runs)."""
        if self.outcome or self.running is not None:
            return None
        if not self.attempts or not self.used:
            return 0.0
        pause = min(_PAUSE_S * 2 ** (self.used - 1), _LONGEST_PAUSE_S)
        return (self.attempts[-1].ended or 0.0) + pause

    def begin(self, number: int, node: str, members: tuple[str, ...], now: float) -> None:
        self.attempts.append(ProgramRun(number, node, members, now))
        del self.attempts[:-_KEPT]

    def end(self, code: int | None, now: float, done: int, *, told: bool) -> None:
        """The running attempt has ended.

        Args:
            code: None if its node failed.
            done: iterations of the job so far.
            `told`: whether it was asked to end, since its job moved or left.
        """
        last = self.attempts[-1]
        last.ended, last.code = now, code
        if told and code is not None:
            return
        if code == 0:
            self.outcome = "done"
            return
        if done > self.done:
            self.done, self.used, self.nodes_lost = done, 0, 0
        if code is None:
            self.nodes_lost += 1
        else:
            self.used += 1
        if self.used > self.program.restarts or self.nodes_lost >= MOST_NODES_LOST:
            self.outcome = "failed"


class RunningPrograms:
    """Jobs with running attempts, by node."""

    def __init__(self) -> None:
        self._on: dict[str, set[str]] = {}

    def add(self, job: str, nodes: Sequence[str]) -> None:
        for node in nodes:
            self._on.setdefault(node, set()).add(job)

    def discard(self, job: str, nodes: Sequence[str]) -> None:
        for node in nodes:
            left = self._on.get(node, set()) - {job}
            if left:
                self._on[node] = left
            else:
                self._on.pop(node, None)

    @property
    def jobs(self) -> set[str]:
        return {job for jobs in self._on.values() for job in jobs}

    def on(self, node: str) -> list[str]:
        return sorted(self._on.get(node, ()))
