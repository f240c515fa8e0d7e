"""How far the online scheduler is from the offline optimum on small instances.

    python benchmarks/rollmux_optimum.py --instances 10 --jobs 7

All jobs are known and long. They arrive one after the other; the scheduler repacks until it finds
nothing more. Both use the same feasibility test.
"""

from __future__ import annotations

import argparse
from collections import deque
from dataclasses import replace

import numpy as np

from rollpacker.rollmux import decisions as do
from rollpacker.rollmux import events as ev
from rollpacker.rollmux.cluster import Job
from rollpacker.rollmux.offline import Optimum
from rollpacker.rollmux.scheduler import Scheduler
from rollpacker.rollmux.settings import Settings
from rollpacker.rollmux.trace import Philly, TraceJob, philly


def instance(count: int, seed: int) -> list[TraceJob]:
    rng = np.random.default_rng(seed)
    jobs: list[TraceJob] = []
    while len(jobs) < count:
        jobs += [j for j in philly(Philly(jobs=count), rng) if len(j.rollout_s) > 150]
    return [
        replace(job, spec=replace(job.spec, id=f"job{number}"))
        for number, job in enumerate(jobs[:count])
    ]


def known(job: TraceJob, live: Job) -> None:
    for pair in zip(job.rollout_s[:60], job.train_s[:60], strict=True):
        live.observed.add(float(pair[0]), float(pair[1]))


def optimum(jobs: list[TraceJob], settings: Settings) -> float:
    live = []
    for job in jobs:
        live.append(Job(job.spec, 0.0))
        known(job, live[-1])
    return Optimum(live, settings, largest=len(jobs)).value()


def value(scheduler: Scheduler) -> float:
    groups = scheduler.cluster.groups.values()
    return sum(scheduler.placement.value(group, 0.0) for group in groups)


def online(jobs: list[TraceJob], settings: Settings, rounds: int = 60) -> float:
    """Jobs wait for nothing: a move is over at once."""
    scheduler = Scheduler(settings)
    for job in jobs:
        _settle(scheduler, ev.JobArrived(spec=job.spec))
        live = scheduler.cluster.jobs[job.spec.id]
        known(job, live)
        assert live.seat is not None
        live.seat.r, live.seat.t = live.observed.means
        scheduler.cluster.changed.update(scheduler.cluster.groups)
        scheduler.look_again()
        for _ in range(rounds):
            _settle(scheduler, None)
    return value(scheduler)


def _settle(scheduler: Scheduler, event: ev.JobArrived | None) -> None:
    waiting: deque[do.Decision] = deque(
        scheduler.handle(0.0, ev.TimePassed() if event is None else event)
    )
    while waiting:
        decision = waiting.popleft()
        if isinstance(decision, do.Move):
            waiting.extend(scheduler.handle(0.0, ev.MoveFinished(job=decision.job)))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--instances", type=int, default=10)
    parser.add_argument("--jobs", type=int, default=7)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    settings = Settings()
    gaps: list[float] = []
    for number in range(args.instances):
        jobs = instance(args.jobs, args.seed + number)
        best, ours = optimum(jobs, settings), online(jobs, settings)
        alone = 57.04 * len(jobs)
        gaps.append(ours / best - 1.0)
        print(
            f"solo {alone:.0f}, optimum {best:.1f}, online {ours:.1f}, gap {gaps[-1]:+.1%}",
            flush=True,
        )
    print(f"mean gap {np.mean(gaps):.1%}, worst {max(gaps):.1%} over {len(gaps)} instances")


if __name__ == "__main__":
    main()
