"""Jobs that wait for named nodes: ours beside queues without sharing, and how right forecasts are.

python benchmarks/rollmux_inventory.py --jobs 200 --days 4 --nodes 64 --seeds 0 1 2

A forecast takes up to two minutes, so only every fourth job that waits has one.
"""

from __future__ import annotations

import argparse
import io
import time

import numpy as np

from rollpacker.rollmux import decisions as do
from rollpacker.rollmux import events as ev
from rollpacker.rollmux.check import check_lines
from rollpacker.rollmux.cluster_sim import ClusterSimulation
from rollpacker.rollmux.event_log import EventLog
from rollpacker.rollmux.forecast import RUNS, forecast, middle
from rollpacker.rollmux.inventory import Fixed, Machine
from rollpacker.rollmux.inventory_file import InventoryFile
from rollpacker.rollmux.policies import WITHOUT_SHARING, Run
from rollpacker.rollmux.result import SimulationResult
from rollpacker.rollmux.scheduler import Scheduler
from rollpacker.rollmux.settings import Settings
from rollpacker.rollmux.trace import Philly, TraceJob, philly


class Forecasting(Scheduler):
    """Says of every so many'th job that has to wait when it will start, and hears when it did."""

    every: int
    waited: int
    said: dict[str, tuple[float, float]]
    right: list[tuple[float, float]]
    """Seconds of waiting, as said and as it was."""

    def handle(self, now: float, event: ev.Event) -> list[do.Decision]:
        made = super().handle(now, event)
        for each in made:
            if isinstance(each, do.Wait) and isinstance(event, ev.JobArrived):
                self.waited += 1
                if self.waited % self.every == 0:
                    self.forecast(each.job, now)
            elif isinstance(each, do.Place) and each.job in self.said:
                at, wait = self.said.pop(each.job)
                self.right.append((wait, now - at))
        return made

    def forecast(self, job: str, now: float) -> None:
        runs = [forecast(self, now, number=number, job=job) for number in range(RUNS)]
        wait = middle(runs).get(job)
        if wait is not None:
            self.said[job] = now, wait


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
    scheduler = Forecasting(nodes.settings(Settings()), Fixed(nodes.machines))
    scheduler.every, scheduler.waited = every, 0
    scheduler.said, scheduler.right = {}, []
    log = io.StringIO()
    began = time.process_time()
    result = ClusterSimulation(jobs, scheduler, EventLog(log)).run()
    print(row(name, result, until))
    violations = check_lines(io.StringIO(log.getvalue()))
    errors = [abs(said - was) / was for said, was in scheduler.right]
    print(
        f"\n{len(violations)} violations; forecasts of {len(errors)} jobs that waited are off by "
        f"{np.median(errors):.0%} at the median; {time.process_time() - began:.0f} CPU s\n"
        if errors
        else f"\n{len(violations)} violations; nobody waited\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--days", type=float, default=4.0, help="of arrivals")
    parser.add_argument("--hours", type=float, default=36.0, help="mean of a job alone")
    parser.add_argument("--nodes", type=int, default=64, help="of either pool")
    parser.add_argument("--every", type=int, default=4, help="job that waits has a forecast")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    args = parser.parse_args()
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
