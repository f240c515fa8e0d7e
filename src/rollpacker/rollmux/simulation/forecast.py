"""When jobs that wait are expected to get nodes: the scheduler itself, run ahead on a copy.

The copy drives a simulated cluster that begins where the scheduler stands: phases go on, those of
a job take what its observed ones did, and who is placed, moved or set aside is decided by the same
code as ever. Jobs go on arriving as they did lately.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from statistics import median_low
from typing import NamedTuple

import numpy as np

from rollpacker.rollmux.model.cluster import Cluster, Job
from rollpacker.rollmux.model.inventory import POOL_NAMES
from rollpacker.rollmux.model.jobs import JobSpec
from rollpacker.rollmux.model.seat import ROLLOUT, RUNNING, WAITING, Seat
from rollpacker.rollmux.model.tail_model import TAIL_TIME
from rollpacker.rollmux.record.trace import TraceJob
from rollpacker.rollmux.scheduler.queue import could_start
from rollpacker.rollmux.scheduler.scheduler import Scheduler
from rollpacker.rollmux.simulation.arrivals import NOBODY, Arrivals
from rollpacker.rollmux.simulation.cluster_sim import ClusterSimulation, Running

EVENTS = 200_000
"""Of a run ahead at most."""
RUNS = 5
"""Runs ahead of which the middle is told: experiments/LOG.md."""
ENOUGH = 3
"""Runs whose least and most are told as a range."""
USUAL_SHARE = 0.8
"""Share of its worst case that a phase takes, where none was seen."""

Pair = tuple[float, float]
"""Seconds of a rollout and of a training phase, or shares of their worst cases."""


def forecast(
    scheduler: Scheduler,
    now: float,
    *,
    number: int = 0,
    job: str | None = None,
    events: int = EVENTS,
    arrivals: Arrivals = NOBODY,
) -> dict[str, float]:
    """Seconds until each job that waits starts, in one run ahead; infinite where nobody can say.

    Changes nothing; takes about as many milliseconds as there are events.

    Args:
        number: of the run: phases are drawn anew in each.
        job: the run ends when this one has started; None: when all have.
        events: of the run at most; who would start later is not told.
        arrivals: who comes meanwhile.
    """
    return _Ahead(scheduler, now, number, arrivals).starts(job, events)


class ExpectedStart(NamedTuple):
    """When a job that waits is expected to start, in seconds from now: the middle of runs ahead.

    ``least`` and ``most`` of them are as far apart as chance makes them; ``most`` may be infinite.
    Of five runs they hold what happens in two of three cases.
    """

    middle: float
    least: float
    most: float
    runs: int
    """That know the job."""

    @property
    def between(self) -> tuple[float, float | None] | None:
        """Least and most; None for the latter where some say never, and at all of few runs."""
        if self.runs < ENOUGH:
            return None
        return self.least, self.most if math.isfinite(self.most) else None


def expected_starts(runs: Sequence[Mapping[str, float]]) -> dict[str, ExpectedStart]:
    """Of each job that any run ahead has seen; those that may never start are left out."""
    found: dict[str, ExpectedStart] = {}
    for job in dict.fromkeys(job for run in runs for job in run):
        waits = [run[job] for run in runs if job in run]
        start = ExpectedStart(median_low(waits), min(waits), max(waits), len(waits))
        if math.isfinite(start.middle):
            found[job] = start
    return found


@dataclass(slots=True, eq=False, kw_only=True)
class _Course(Running):
    """How a job goes on: each iteration is one of those that were seen.

    Args:
        random: draws them.
        seen: what they took.
        left: iterations, the one that is running included; infinite where nobody can say.
        drawn: what this one takes.
    """

    random: np.random.Generator
    seen: Sequence[Pair]
    left: float
    drawn: Pair = (0.0, 0.0)

    def __post_init__(self) -> None:
        self._draw(self.seen)

    def _draw(self, seen: Sequence[Pair]) -> None:
        self.drawn = seen[int(self.random.integers(len(seen)))]

    def lasts(self, least_s: float) -> None:
        """The phase that is running has not been over after so many seconds."""
        pool = POOL_NAMES.index(self.phase)
        self._draw([pair for pair in self.seen if pair[pool] >= least_s] or self.seen)

    def seconds(self) -> float:
        return self.drawn[POOL_NAMES.index(self.phase)]

    @property
    def last(self) -> bool:
        return self.done + 1 >= self.left

    @property
    def ends(self) -> bool:
        return self.left < math.inf

    def iterate(self) -> None:
        self.done += 1
        self._draw(self.seen)


class _Ahead(ClusterSimulation):
    """The cluster of a scheduler's copy, from now on."""

    def __init__(self, scheduler: Scheduler, now: float, number: int, arrivals: Arrivals) -> None:
        super().__init__((), deepcopy(scheduler))
        self._random = np.random.default_rng(number)
        self._coming = arrivals.draw(now, np.random.default_rng((number, 1)))
        self._began = self.now = self.meter.since = now
        cluster = self._scheduler.cluster
        self._shares = _shares(cluster)
        self._pools = {node.name: node.pool for node in cluster.nodes.values() if node.held}
        for job in cluster.jobs.values():
            course = self._course(job.spec, job.submitted, job.observed.ring, job.done)
            self._live[job.spec.id] = course
            self._take_up(course, job)
        self._look_later()
        self._expect_another()

    def starts(self, job: str | None, events: int) -> dict[str, float]:
        """Until the job has started, or all who ever will, or so many events have happened."""
        cluster, queue = self._scheduler.cluster, self._scheduler.queue
        found = dict.fromkeys(queue.jobs, math.inf)
        waiting = {
            name: each
            for name, each in queue.jobs.items()
            if not each.held and could_start(cluster.inventory, each)
        }
        for _ in range(events):
            done = not waiting if job is None else job not in waiting
            if done or not self._heap or not self._somebody_leaves():
                break
            self._next()
            for name in [name for name, each in waiting.items() if each.waits_since is None]:
                found[name] = self.now - self._began
                del waiting[name]
        return found

    def _somebody_leaves(self) -> bool:
        return any(run.waits_since is None and run.ends for run in self._live.values())

    def _expect_another(self) -> None:
        coming = next(self._coming, None)
        if coming is not None:
            self._at(coming[0], self._come, coming[1])

    def _come(self, spec: JobSpec) -> None:
        run = self._live[spec.id] = self._course(spec, self.now)
        self._join(run)
        self._expect_another()

    def _course(
        self, spec: JobSpec, submitted: float, seen: Sequence[Pair] = (), done: int = 0
    ) -> _Course:
        if not seen:
            rollout, train = self._shares[int(self._random.integers(len(self._shares)))]
            seen = [(rollout * spec.worst_rollout_s, train * spec.worst_train_s)]
        none, left = np.zeros(0), spec.left(done)
        if left is None and spec.expected_iterations is not None:
            left = 1  # it is over any moment
        return _Course(
            TraceJob(spec, submitted, none, none),
            random=self._random,
            seen=tuple(seen),
            left=math.inf if left is None else left,
        )

    def _take_up(self, run: _Course, job: Job) -> None:
        """It does what it was doing."""
        if job.waits_since is not None:
            run.wait(self.now, clock_runs=job.stopped_at is None)
            run.moving = job.admitted
            job.asked = True
        elif job.going:
            assert job.destination is not None
            run.moving, run.homes = True, job.destination.nodes
            done = max(self.now, job.went_at + self._scheduler.settings.cold_s)
            self._at(done, self._end_move, run, run.homes)
        elif job.seat is not None:
            self._sit(run, job, job.seat)

    def _sit(self, run: _Course, job: Job, seat: Seat) -> None:
        assert job.home is not None
        run.phase = "rollout" if seat.pool == ROLLOUT else "train"
        if seat.state in RUNNING:
            self._go_on(run, job, seat)
        elif seat.state not in WAITING:
            self._at(self.now, self._finish if job.over else self._ask, run)

    def _reach_tail(self, run: Running, token: int) -> None:
        """As far as anybody knows, those leave no tail that have finished a rollout without one."""
        job = self._scheduler.cluster.jobs.get(run.job.spec.id)
        if job is not None and (job.leaves_tails or not job.observed.count):
            super()._reach_tail(run, token)

    def _go_on(self, run: _Course, job: Job, seat: Seat) -> None:
        """Its phase has been running for a while."""
        assert job.home is not None
        nodes = job.home.nodes[seat.pool]
        self._tenant |= dict.fromkeys(nodes, job.spec.id)
        run.token = job.token
        run.began = seat.running_since
        # Beside a tail, or as one itself, it takes longer.
        longer = (seat.expected_end - seat.running_since) / seat.seconds(seat.pool)
        run.lasts((self.now - run.began) / longer)
        run.end_at = run.began + run.seconds() * longer
        run.tailing = seat.pool == ROLLOUT and not seat.busy
        if run.tailing:
            self._tails |= dict.fromkeys(nodes, run.end_at)
        elif seat.pool == ROLLOUT and not job.tail_reached:
            tail = run.began + TAIL_TIME * (run.end_at - run.began)
            self._at(max(self.now, tail), self._reach_tail, run, run.token)
        run.end_at = max(self.now, run.end_at)
        self._at(run.end_at, self._end_phase, run, run.token, nodes)


def _shares(cluster: Cluster) -> list[Pair]:
    """Of their worst cases that phases take, of each job whose iterations were seen."""
    shares = [
        (
            job.observed.means[0] / job.spec.worst_rollout_s,
            job.observed.means[1] / job.spec.worst_train_s,
        )
        for job in cluster.jobs.values()
        if job.observed.known
    ]
    return shares or [(USUAL_SHARE, USUAL_SHARE)]
