"""The programs of jobs: which was started where, how it ended, and whether it starts again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from rollpacker.rollmux.program import Program

_KEPT = 20
"""Attempts of a job that are remembered."""
_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
"""Before a program that failed starts again: the first time, and at most; doubled in between."""

Outcome = Literal["", "done", "failed", "stopped"]


@dataclass(slots=True)
class Attempt:
    """One start of a program.

    Args:
        number: 1, 2, 3, ...
        began: time, as all times here.
        code: its exit code; None while it runs, or where its node failed.
    """

    number: int
    node: str
    began: float
    ended: float | None = None
    code: int | None = None


@dataclass(slots=True)
class Started:
    """A job's program and what became of it.

    Args:
        attempts: the last ones.
        used: restarts since the job last got on.
        done: iterations of the job at the last of these restarts.
    """

    program: Program
    attempts: list[Attempt] = field(default_factory=list[Attempt])
    used: int = 0
    done: int = 0
    outcome: Outcome = ""

    @property
    def running(self) -> Attempt | None:
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

    def begin(self, number: int, node: str, now: float) -> None:
        """It is started on a node."""
        self.attempts.append(Attempt(number, node, now))
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
        if told or code is None:
            return
        if code == 0:
            self.outcome = "done"
            return
        if done > self.done:
            self.done, self.used = done, 0
        self.used += 1
        if self.used > self.program.restarts:
            self.outcome = "failed"

    def job_ended(self) -> None:
        """Nothing is started any more."""
        self.outcome = self.outcome or "stopped"


class Programs:
    """Those of all jobs that have one."""

    def __init__(self) -> None:
        self.jobs: dict[str, Started] = {}
        self._on: dict[str, set[str]] = {}

    def give(self, job: str, program: Program) -> None:
        """A job is to be started by agents."""
        self.jobs[job] = Started(program)

    def begin(self, job: str, number: int, node: str, now: float) -> None:
        """The agent of a node is told to start it."""
        self.jobs[job].begin(number, node, now)
        self._on.setdefault(node, set()).add(job)

    def end(self, job: str, code: int | None, now: float, done: int, *, told: bool) -> None:
        """An attempt is over; see ``Started.end``."""
        started = self.jobs[job]
        running = started.running
        if running is not None:
            self._on[running.node].discard(job)
            started.end(code, now, done, told=told)

    def node_failed(self, node: str, now: float) -> None:
        """What ran there is gone."""
        for job in sorted(self._on.pop(node, ())):
            self.jobs[job].end(None, now, 0, told=True)

    def running_on(self, node: str) -> Iterable[tuple[str, Attempt]]:
        """Jobs whose programs run on a node, each with the attempt."""
        for job in sorted(self._on.get(node, ())):
            running = self.jobs[job].running
            if running is not None:
                yield job, running

    def restore(self, jobs: dict[str, Started]) -> None:
        """Those of a snapshot."""
        self.jobs = jobs
        for job, started in jobs.items():
            if (running := started.running) is not None:
                self._on.setdefault(running.node, set()).add(job)
