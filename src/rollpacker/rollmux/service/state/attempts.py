"""The programs of jobs: which was started where, how it ended, and whether it starts again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from rollpacker.rollmux.model.program import JobProgram

_KEPT = 20
"""Attempts of a job that are remembered."""
MOST_NODES_LOST = 3
"""Nodes that may fail in a row under a program: a job that breaks its nodes ends."""
_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
"""Before a program that failed starts again: the first time, and at most; doubled in between."""

Outcome = Literal["", "done", "failed", "stopped"]


@dataclass(slots=True)
class ProgramRun:
    """One start of a program.

    Args:
        number: 1, 2, 3, ...
        members: its job's other nodes, where it has processes too.
        began: time, as all times here.
        code: its exit code; None while it runs, or where its node failed.
        lost: those of them that have failed.
        broken: its process on one of them has failed, so it is to end.
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
        """All of them, the driver's first."""
        return (self.node, *self.members)

    @property
    def left(self) -> list[str]:
        """Those that have not failed."""
        return [node for node in self.nodes if node not in self.lost]


@dataclass(slots=True)
class ProgramRuns:
    """A job's program and what became of it.

    Args:
        attempts: the last ones.
        used: restarts since the job last got on.
        done: iterations of the job at the last of these restarts.
        nodes_lost: that failed under it since the job last got on.
    """

    program: JobProgram
    attempts: list[ProgramRun] = field(default_factory=list[ProgramRun])
    used: int = 0
    done: int = 0
    outcome: Outcome = ""
    nodes_lost: int = 0

    @property
    def running(self) -> ProgramRun | None:
        """The attempt that has not ended, as far as anybody knows."""
        last = self.attempts[-1] if self.attempts else None
        return last if last is not None and last.ended is None else None

    def ready_at(self) -> float | None:
        """When it may be started, from here on; None for never, or while it runs."""
        if self.outcome or self.running is not None:
            return None
        if not self.attempts or not self.used:
            return 0.0
        pause = min(_PAUSE_S * 2 ** (self.used - 1), _LONGEST_PAUSE_S)
        return (self.attempts[-1].ended or 0.0) + pause

    def begin(self, number: int, node: str, members: tuple[str, ...], now: float) -> None:
        """It is started on a node, and on those of its job that it has processes on."""
        self.attempts.append(ProgramRun(number, node, members, now))
        del self.attempts[:-_KEPT]

    def end(self, code: int | None, now: float, done: int, *, told: bool) -> None:
        """The running attempt is over.

        Args:
            code: None where its node failed.
            done: iterations of the job so far.
            told: to end: its job has other nodes, or none.
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

    def job_ended(self) -> None:
        """Nothing is started any more."""
        self.outcome = self.outcome or "stopped"


class RunningPrograms:
    """Which jobs have a program on which node, by the attempts that have not ended."""

    def __init__(self) -> None:
        self._on: dict[str, set[str]] = {}

    def add(self, job: str, nodes: Sequence[str]) -> None:
        """An attempt is begun there."""
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
        """Jobs whose programs are there."""
        return sorted(self._on.get(node, ()))
