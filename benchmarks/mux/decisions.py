"""How long decisions take, and how much memory, with many live jobs.

    python -m benchmarks.mux.decisions --jobs 1050 --live 1000 --events 20000

Jobs of one node arrive within some minutes and stay; the process CPU time of every decision is
measured from when so many are live.
"""

from __future__ import annotations

import resource
import time

import numpy as np

from benchmarks._run import flags
from rollpacker.rollmux.model import decisions as do
from rollpacker.rollmux.model import events as ev
from rollpacker.rollmux.model.settings import Settings
from rollpacker.rollmux.record.trace import Philly, philly
from rollpacker.rollmux.scheduler.scheduler import Scheduler
from rollpacker.rollmux.simulation.cluster_sim import ClusterSimulation


class EnoughError(Exception):
    """So many events were handled."""


class Stopping(Scheduler):
    def __init__(self, events: int, live: int) -> None:
        super().__init__(Settings())
        self.left = events
        self.live = live
        self.seconds: dict[str, list[float]] = {}

    def handle(self, now: float, event: ev.Event) -> list[do.Decision]:
        if len(self.cluster.jobs) < self.live:
            return super().handle(now, event)
        self.left -= 1
        if self.left < 0:
            raise EnoughError
        began = time.process_time()
        made = super().handle(now, event)
        self.seconds.setdefault(type(event).__name__, []).append(time.process_time() - began)
        return made


def main() -> None:
    args = flags(__doc__, jobs=1000, live=900, minutes=10.0, events=20_000).parse_args()
    rng = np.random.default_rng(0)
    jobs = philly(Philly(jobs=args.jobs, days=args.minutes / 1440, mean_hours=20.0), rng)
    scheduler = Stopping(args.events, args.live)
    try:
        ClusterSimulation(jobs, scheduler).run()
    except EnoughError:
        live = len(scheduler.cluster.jobs)
        nodes = len(scheduler.cluster.nodes)
        print(f"{live} live jobs in {len(scheduler.cluster.groups)} groups on {nodes} nodes")
    scheduler.seconds["all"] = [s for each in scheduler.seconds.values() for s in each]
    for name, seconds in sorted(scheduler.seconds.items()):
        p50, p99 = np.percentile(seconds, [50, 99]) * 1e3
        worst = max(seconds) * 1e3
        print(f"{name:16} {len(seconds):7} p50 {p50:.3f} p99 {p99:.3f} max {worst:.2f} ms")
    print(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MB")


if __name__ == "__main__":
    main()
