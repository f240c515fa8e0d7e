"""When jobs that wait are expected to get nodes: the scheduler itself, run ahead on a copy.

In the copy there are no phases: jobs go on at the pace that they have had, and leave when their
iterations are done. Who is placed, moved or set aside then is decided by the same code as ever.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from statistics import median_low
from typing import TYPE_CHECKING

import numpy as np

from rollpacker.rollmux import decisions as do
from rollpacker.rollmux import events as ev
from rollpacker.rollmux.admission import expected
from rollpacker.rollmux.cluster import Job
from rollpacker.rollmux.jobs import KNOWN_AFTER
from rollpacker.rollmux.seat import NEVER

if TYPE_CHECKING:
    from rollpacker.rollmux.scheduler import Scheduler

LOOKS = 400
RUNS = 7
"""Runs ahead of which the middle is told: docs/log.md."""
SPREAD = 0.05
"""Of the paces of jobs from run to run, as a share."""
REPACKING = 12.0
"""Effort of repacking at a look: docs/log.md."""
LOOK_S = 1200.0
"""Seconds from one look at those who wait to the next at most."""
USUAL_PACE = 1.2
"""Slowdown of a job that is not known yet."""
USUAL_SHARE = 0.8
"""Share of its worst case that an iteration takes, where none was seen."""


@dataclass(frozen=True, slots=True)
class _Course:
    """How a job has got on, and how it goes on from ``since``."""

    since: float
    done: int
    solo_s: float
    pace: float


def _usual_share(scheduler: Scheduler) -> float:
    """Of its worst case that an iteration takes, of the jobs whose iterations were seen."""
    shares = [
        sum(job.observed.means) / (job.spec.worst_rollout_s + job.spec.worst_train_s)
        for job in scheduler.cluster.jobs.values()
        if job.observed.known
    ]
    return sum(shares) / len(shares) if shares else USUAL_SHARE


def forecast(
    scheduler: Scheduler, now: float, looks: int = LOOKS, number: int = 0
) -> dict[str, float]:
    """Seconds until each job that waits starts, in one run ahead; infinite where nobody can say.

    Changes nothing; takes some milliseconds for every look.

    Args:
        looks: departures and pauses of ``LOOK_S`` at most; after so many nobody can say.
        number: of the run; in each but the first, 0, paces are a little different.
    """
    return _Ahead(scheduler, now, number).run(looks)


def middle(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of runs ahead, for each job that any of them has seen; those that may never start are left
    out."""
    jobs = dict.fromkeys(job for run in runs for job in run)
    found = {job: median_low(run[job] for run in runs if job in run) for job in jobs}
    return {job: wait for job, wait in found.items() if math.isfinite(wait)}


class _Ahead:
    def __init__(self, scheduler: Scheduler, now: float, number: int) -> None:
        self._random = np.random.default_rng(number)
        self._spread = SPREAD if number else 0.0
        self._copy = deepcopy(scheduler)
        self._settings = scheduler.settings
        self._began = now
        self._now = now
        self._courses: dict[str, _Course] = {}
        self._starts = dict.fromkeys(scheduler.queue.jobs, math.inf)
        self._share = _usual_share(scheduler)
        # Between two looks the scheduler tries again and again, and remembers what it rehearsed.
        self._copy.admission.seat_effort = 0.0
        for job in list(self._copy.cluster.jobs.values()):
            if job.going:
                self._post(ev.MoveFinished(job=job.spec.id))
            self._quiet(job)
            if job.home is not None:
                self._set_out(job)

    def _quiet(self, job: Job) -> None:
        """It is between two iterations from now on, and asks for nothing."""
        if job.seat is not None:
            job.token = -1
            job.seat.arrive(False, NEVER)

    def _set_out(self, job: Job) -> None:
        pace = min(USUAL_PACE, job.spec.slo)
        if job.observed.known:
            pace = min(max(1.0, (self._now - job.started) / job.solo_s), job.spec.slo)
        pace = max(1.0, pace * math.exp(self._spread * self._random.standard_normal()))
        self._courses[job.spec.id] = _Course(self._now, job.done, job.solo_s, pace)

    def run(self, looks: int) -> dict[str, float]:
        """Until all have started, or nobody leaves any more."""
        for _ in range(looks):
            if not self._copy.queue.jobs:
                break
            leaves = min(self._courses, key=self._end, default=None)
            end = NEVER if leaves is None else self._end(leaves)
            if end >= NEVER:
                break
            if leaves is not None and end <= self._now + LOOK_S:
                self._now = max(self._now, end)
                self._advance()
                del self._courses[leaves]
                self._post(ev.JobEnded(job=leaves))
            else:
                self._now += LOOK_S
                self._advance()
                self._post(ev.TimePassed())
            self._perform(self._copy.catch_up(self._now, REPACKING))
        return self._starts

    def _end(self, name: str) -> float:
        job, course = self._copy.cluster.jobs[name], self._courses[name]
        if job.spec.iterations is None:
            return NEVER
        return (
            course.since
            + (job.spec.iterations - course.done) * self._iteration_s(job) * course.pace
        )

    def _iteration_s(self, job: Job) -> float:
        """Alone: as observed, or what jobs usually take of their worst case."""
        share = 1.0 if job.observed.known else self._share
        return share * sum(expected(job, self._settings))

    def _advance(self) -> None:
        """Everybody has got on."""
        for name, course in self._courses.items():
            job = self._copy.cluster.jobs[name]
            alone = (self._now - course.since) / course.pace
            iterations = int(alone / self._iteration_s(job))
            job.done = course.done + iterations
            if iterations >= KNOWN_AFTER and not job.observed.known:
                self._seen(job)
            job.solo_s = course.solo_s + alone

    def _seen(self, job: Job) -> None:
        """It is known by now: as short as jobs usually turn out to be."""
        spec, share = job.spec, self._share
        for _ in range(KNOWN_AFTER):
            job.observed.add(share * spec.worst_rollout_s, share * spec.worst_train_s)
        if job.seat is not None:
            job.seat.learn(0.0, job.observed.means)

    def _post(self, event: ev.Event) -> None:
        self._perform(self._copy.handle(self._now, event))

    def _perform(self, decisions: list[do.Decision]) -> None:
        events: list[ev.Event] = []
        while decisions or events:
            for made in decisions:
                match made:
                    case do.Place():
                        self._start(made.job)
                    case do.Move():
                        events.append(ev.MoveFinished(job=made.job))
                        if made.job not in self._courses:
                            self._start(made.job)
                    case do.Suspend():
                        self._courses.pop(made.job, None)
                    case _:
                        pass
            decisions = self._copy.handle(self._now, events.pop(0)) if events else []
        for job in self._copy.cluster.jobs.values():
            self._quiet(job)

    def _start(self, name: str) -> None:
        if self._starts.get(name) == math.inf:
            self._starts[name] = self._now - self._began
        self._set_out(self._copy.cluster.jobs[name])
