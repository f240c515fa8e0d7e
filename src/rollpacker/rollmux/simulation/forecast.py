"""Forecasts when waiting jobs get nodes: runs a copy of the scheduler ahead.

The copy drives a simulated cluster from the scheduler's present state. Phases take observed times
of their jobs, jobs arrive as they did lately, and the same code decides.
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

EVENTS = 200_000  # most events of a run
RUNS = 5  # runs of a forecast, whose median is reported (experiments/LOG.md)
ENOUGH = 3  # runs needed to report their range
USUAL_SHARE = 0.8  # share of its worst case that a phase takes if none was observed

Pair = tuple[float, float]  # rollout and training seconds, or shares of their worst cases


def forecast(
    scheduler: Scheduler,
    now: float,
    *,
    number: int = 0,
    job: str | None = None,
    events: int = EVENTS,
    arrivals: Arrivals = NOBODY,
) -> dict[str, float]:
    """Seconds until each waiting job starts, in one run ahead (infinite if unknown).

    Changes nothing. It takes about a millisecond per event.

    Args:
        number: number of the run, which seeds the drawn phases.
        job: stop when this job has started (None waits for all).
        events: most events of the run. Later starts are infinite.
        arrivals: jobs that arrive meanwhile.
    """
    return _Ahead(scheduler, now, number, arrivals).starts(job, events)


class ExpectedStart(NamedTuple):
    """Expected start of a waiting job in seconds from now: the median of the runs.

    ``least`` and ``most`` are the range over the runs. ``most`` may be infinite. The range of five
    runs contains the real start in two of three cases.
    """

    middle: float
    least: float
    most: float
    runs: int

    @property
    def between(self) -> tuple[float, float | None] | None:
        """Range. Its end is None if some runs say never (None if there are too few runs)."""
        if self.runs < ENOUGH:
            return None
        return self.least, self.most if math.isfinite(self.most) else None


def expected_starts(runs: Sequence[Mapping[str, float]]) -> dict[str, ExpectedStart]:
    """The expected start of each job. Jobs that may never start are left out."""
    found: dict[str, ExpectedStart] = {}
    for job in dict.fromkeys(job for run in runs for job in run):
        waits = [run[job] for run in runs if job in run]
        start = ExpectedStart(median_low(waits), min(waits), max(waits), len(waits))
        if math.isfinite(start.middle):
            found[job] = start
    return found


@dataclass(slots=True, eq=False, kw_only=True)
class _Course(Running):
    """The rest of a job: each iteration is drawn from the observed ones.

    ``left`` includes the running iteration. It is infinite if unknown.
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
        cluster, queue = self._scheduler.cluster, self._scheduler.queue
        found = dict.fromkeys(queue.jobs, math.inf)
        waiting = {
            name: each
            for name, each in queue.jobs.items()
            if not each.held and could_start(cluster.inventory, each)
        }
        for _ in range(events):
            done = not waiting if job is None else job not in waiting
            leaves = any(run.waits_since is None and run.ends for run in self._live.values())
            if done or not self._heap or not leaves:
                break
            self._next()
            for name in [name for name, each in waiting.items() if each.waits_since is None]:
                found[name] = self.now - self._began
                del waiting[name]
        return found

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
            left = 1  # the job may end any moment
        return _Course(
            TraceJob(spec, submitted, none, none),
            random=self._random,
            seen=tuple(seen),
            left=math.inf if left is None else left,
        )

    def _take_up(self, run: _Course, job: Job) -> None:
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
        """Jobs that have finished a rollout without a tail are assumed to leave none."""
        job = self._scheduler.cluster.jobs.get(run.job.spec.id)
        if job is not None and (job.leaves_tails or not job.observed.count):
            super()._reach_tail(run, token)

    def _go_on(self, run: _Course, job: Job, seat: Seat) -> None:
        assert job.home is not None
        nodes = job.home.nodes[seat.pool]
        self._tenant |= dict.fromkeys(nodes, job.spec.id)
        run.token = job.token
        run.began = seat.running_since
        # A phase beside a tail, or a tail itself, takes longer.
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
    """Shares of their worst cases that phases take, for each observed job."""
    shares = [
        (
            job.observed.means[0] / job.spec.worst_rollout_s,
            job.observed.means[1] / job.spec.worst_train_s,
        )
        for job in cluster.jobs.values()
        if job.observed.known
    ]
    return shares or [(USUAL_SHARE, USUAL_SHARE)]
