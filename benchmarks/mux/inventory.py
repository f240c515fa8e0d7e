"""Jobs that wait for named nodes: ours beside queues without sharing, and how right forecasts are.

python -m benchmarks.mux.inventory --jobs 200 --days 4 --nodes 64 --seeds 0 1 2

A forecast takes up to three minutes, so only every fourth job that waits has one.
"""

from __future__ import annotations

import io
import time

import numpy as np

from benchmarks._run import flags
from rollpacker.rollmux.model import events as ev
from rollpacker.rollmux.model.inventory import Fixed, Machine
from rollpacker.rollmux.model.settings import Settings
from rollpacker.rollmux.record.event_log import EventLog
from rollpacker.rollmux.record.trace import Philly, TraceJob, philly
from rollpacker.rollmux.scheduler.inventory_file import InventoryFile
from rollpacker.rollmux.scheduler.scheduler import Scheduler
from rollpacker.rollmux.simulation.arrivals import lately
from rollpacker.rollmux.simulation.cluster_sim import ClusterSimulation, Running
from rollpacker.rollmux.simulation.forecast import RUNS, ExpectedStart, expected_starts, forecast
from rollpacker.rollmux.simulation.policies import WITHOUT_SHARING, Run
from rollpacker.rollmux.simulation.result import SimulationResult


class Forecasting(ClusterSimulation):
    """Says of every so many'th job that has to wait when it will start, and sees when it does."""

    def __init__(
        self, jobs: list[TraceJob], scheduler: Scheduler, log: EventLog, every: int
    ) -> None:
        super().__init__(jobs, scheduler, log)
        self.every = every
        self.waited = 0
        self.said: dict[str, tuple[float, ExpectedStart]] = {}
        self.right: list[tuple[ExpectedStart, float]] = []
        """As said, and the seconds of waiting as they were."""

    def _join(self, run: Running) -> None:
        super()._join(run)
        if run.waits_since is not None:
            self.waited += 1
            if self.waited % self.every == 0:
                self.forecast(run.job.spec.id)

    def _post(self, event: ev.Event) -> None:
        super()._post(event)
        for job in [name for name in self.said if self._live[name].waits_since is None]:
            at, start = self.said.pop(job)
            self.right.append((start, self.now - at))

    def forecast(self, job: str) -> None:
        scheduler, now = self._scheduler, self.now
        coming = lately(scheduler.cluster, now)
        runs = [
            forecast(scheduler, now, number=number, job=job, arrivals=coming)
            for number in range(RUNS)
        ]
        start = expected_starts(runs).get(job)
        if start is not None:
            self.said[job] = now, start


def row(name: str, result: SimulationResult, until: float) -> str:
    found = result.to_json()
    done = sum(job.ended <= until for job in result.jobs)
    return (
        f"| {name} | {done} | {found['makespan_h']:.0f} h | {found['slowdown']['mean']:.2f} "
        f"| {found['slowdown']['p95']:.2f} | {found['wait_s']['mean'] / 3600:.1f} h "
        f"| {found['slo_attained']:.1%} | {found['idle']['rollout']:.0%} "
        f"/ {found['idle']['train']:.0%} |"
    )


def ours(nodes: InventoryFile, jobs: list[TraceJob], name: str, until: float, every: int) -> None:
    scheduler = Scheduler(nodes.settings(Settings()), Fixed(nodes.machines))
    began = time.process_time()
    simulation = Forecasting(jobs, scheduler, EventLog(io.StringIO()), every)
    result = simulation.run()
    print(row(name, result, until))
    took = f"{time.process_time() - began:.0f} CPU s"
    print(f"\n{forecasts(simulation.right)}; {took}\n", flush=True)


def forecasts(right: list[tuple[ExpectedStart, float]]) -> str:
    """How right they were."""
    if not right:
        return "nobody waited"
    errors = [abs(start.middle - was) / was for start, was in right]
    ratio = np.median([start.middle / was for start, was in right])
    within = np.mean([start.least <= was <= start.most for start, was in right])
    each = " ".join(f"{start.middle / was:.2f}" for start, was in right)
    return (
        f"forecasts of {len(right)} jobs that waited are off by {np.median(errors):.0%} at the "
        f"median, told over true {ratio:.2f} there, {within:.0%} of waits inside of what was told "
        f"(told over true: {each})"
    )


def main() -> None:
    args = flags(
        __doc__,
        jobs=200,
        days=(4.0, "of arrivals"),
        hours=(36.0, "mean of a job alone"),
        nodes=(64, "of either pool"),
        every=(4, "job that waits has a forecast"),
        seeds=[0, 1, 2],
    ).parse_args()
    machines = [
        Machine(name=f"{pool}-{number:03d}", pool=pool)
        for pool in ("rollout", "train")
        for number in range(args.nodes)
    ]
    nodes = InventoryFile(machines=tuple(machines))
    shape = Philly(jobs=args.jobs, days=args.days, nodes="mixed", mean_hours=args.hours)
    for seed in args.seeds:
        jobs = philly(shape, np.random.default_rng(seed))
        until = jobs[-1].arrival_s + 86_400.0
        print(f"seed {seed}; done: a day after the last arrival; idle: of all nodes, to the end\n")
        print("| policy | done | all done | slowdown | p95 | wait | SLO | idle |")
        print("|---|---|---|---|---|---|---|---|")
        for name, policy in WITHOUT_SHARING.items():
            print(row(name, policy(Run(jobs, seed, EventLog(None), None, nodes)), until))
        ours(nodes, jobs, "rollmux", until, args.every)


if __name__ == "__main__":
    main()
