"""A simulated cluster: sends timed events to the scheduler and carries out its decisions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any, Literal

from rollpacker.core.types import Phase
from rollpacker.policy.engines.fleet import TAIL_ENGINES
from rollpacker.rollmux.model import decisions as do
from rollpacker.rollmux.model import events as ev
from rollpacker.rollmux.model.cluster import Job
from rollpacker.rollmux.model.inventory import POOL_NAMES, Fixed, count_pools
from rollpacker.rollmux.model.seat import NEVER
from rollpacker.rollmux.model.settings import Settings
from rollpacker.rollmux.model.tail_model import TAIL_COST, TAIL_TIME, extra_beside
from rollpacker.rollmux.placement.placement import Site
from rollpacker.rollmux.record.event_log import EventLog
from rollpacker.rollmux.record.trace import TraceJob
from rollpacker.rollmux.scheduler.inventory_file import InventoryFile
from rollpacker.rollmux.scheduler.scheduler import Scheduler
from rollpacker.rollmux.simulation.result import (
    FinishedJob,
    Meter,
    SimulationResult,
    lower_bound,
    span_hours,
)

Clock = Callable[[], float]
Policy = Literal["rollmux", "solo"]


def simulate(
    jobs: Sequence[TraceJob],
    policy: Policy,
    log: EventLog | None = None,
    clock: Clock | None = None,
    nodes: InventoryFile | None = None,
) -> SimulationResult:
    """Run a trace through the scheduler. Under ``solo`` every job gets nodes of its own.

    ``nodes`` None is a cloud without a limit.
    """

    def own_nodes(job: Job, now: float) -> Site | None:
        return scheduler.placement.isolated(job, now)

    settings = Settings(repack=policy == "rollmux")
    inventory = None
    if nodes is not None:
        settings = nodes.settings(settings)
        inventory = Fixed(nodes.machines) if nodes.prices is None else None
    scheduler = Scheduler(settings, inventory, own_nodes if policy == "solo" else None)
    return ClusterSimulation(jobs, scheduler, log, clock).run()


@dataclass(slots=True, eq=False)
class Running:
    """A job of the trace in the simulated cluster."""

    job: TraceJob
    done: int = 0
    moving: bool = False
    phase: Phase = "rollout"
    token: int = -1
    began: float = 0.0
    end_at: float = 0.0
    tailing: bool = False
    homes: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    epoch: int = 0
    waits_since: float | None = None
    waited_s: float = 0.0
    uncounted_s: float = 0.0
    clock_runs: bool = False

    def wait(self, now: float, *, clock_runs: bool) -> None:
        self.waits_since, self.clock_runs = now, clock_runs
        self.homes = ((), ())

    def go_on(self, now: float) -> None:
        if self.waits_since is not None:
            waited = now - self.waits_since
            self.waited_s += waited
            self.uncounted_s += 0.0 if self.clock_runs else waited
            self.waits_since = None

    def seconds(self) -> float:
        times = self.job.rollout_s if self.phase == "rollout" else self.job.train_s
        return float(times[self.done])

    @property
    def last(self) -> bool:
        return self.done + 1 == len(self.job.rollout_s)

    @property
    def ends(self) -> bool:
        return True

    def iterate(self) -> None:
        self.done += 1


class ClusterSimulation:
    """Runs a trace through a scheduler, which gets only events of a real cluster.

    Args:
        clock: measures the time of decisions (None does not measure).
        failures: ``(seconds, pool)``: the busiest node of that pool dies then.
        others: other events by time, such as nodes that join or leave.
    """

    def __init__(
        self,
        jobs: Sequence[TraceJob],
        scheduler: Scheduler,
        log: EventLog | None = None,
        clock: Clock | None = None,
        failures: Sequence[tuple[float, int]] = (),
        others: Sequence[tuple[float, ev.Event]] = (),
    ) -> None:
        self._jobs = jobs
        self._scheduler = scheduler
        self._log = log or EventLog(None)
        self._clock = clock
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0
        self._live: dict[str, Running] = {}
        self._look = NEVER
        self._tenant: dict[str, str] = {}
        self._pools: dict[str, int] = {}
        self._tails: dict[str, float] = {}
        self.meter = Meter(since=jobs[0].arrival_s if jobs else 0.0)
        self.results: list[FinishedJob] = []
        self.decision_s: list[float] = []
        for job in jobs:
            self._at(job.arrival_s, self._arrive, job)
        for at, pool in failures:
            self._at(at, self._fail, pool)
        for at, event in others:
            self._at(at, self._happen, event)

    def run(self) -> SimulationResult:
        prices = self._scheduler.settings.prices
        machines = self._scheduler.cluster.inventory.machines
        self._log.meta(self._scheduler.settings, self._jobs, machines)
        while self._heap:
            self._next()
        assert not self._live, f"jobs that never ended: {sorted(self._live)}"
        return SimulationResult(
            tuple(self.results),
            self.meter,
            span_hours(self._jobs),
            lower_bound(self._jobs, prices),
            prices,
            self.decision_s,
            count_pools(machines) if machines else None,
        )

    def _next(self) -> None:
        at, _, action, args = heappop(self._heap)
        self.now = max(self.now, at)
        action(*args)

    def _at(self, time: float, action: Callable[..., None], *args: Any) -> None:
        self._count += 1
        heappush(self._heap, (time, self._count, action, args))

    def _post(self, event: ev.Event) -> None:
        if self._clock is None:
            made = self._scheduler.handle(self.now, event)
        else:
            began = self._clock()
            made = self._scheduler.handle(self.now, event)
            self.decision_s.append(self._clock() - began)
        for decision in made:
            self._log.happened(self.now, decision)
            if (perform := _PERFORM.get(type(decision))) is not None:
                perform(self, decision)
        self._look_later()

    def _look_later(self) -> None:
        look = self._scheduler.next_look()
        if look < self._look:
            self._look = look
            self._at(look, self._pass_time, look)

    def _pass_time(self, due: float) -> None:
        if due != self._look:
            return
        self._look = NEVER
        if self._scheduler.next_look() <= self.now:
            self._post(ev.TimePassed())
        self._look_later()

    def _arrive(self, job: TraceJob) -> None:
        run = self._live[job.spec.id] = Running(job)
        self._join(run)

    def _join(self, run: Running) -> None:
        spec = run.job.spec
        run.wait(self.now, clock_runs=spec.slo_since == "submission")
        self._post(ev.JobArrived(spec=spec))
        self._ask(run)

    def _ask(self, run: Running) -> None:
        self._post(ev.PermitRequested(job=run.job.spec.id, phase=run.phase))

    def _happen(self, event: ev.Event) -> None:
        self._log.happened(self.now, event)
        self._post(event)

    def _acquire(self, decision: do.AcquireNodes) -> None:
        for node in decision.nodes:
            self._pools[node] = self._scheduler.cluster.nodes[node].pool
            self.meter.change(self.now, self._pools[node], 1)

    def _release(self, decision: do.ReleaseNodes) -> None:
        for node in decision.nodes:
            self.meter.change(self.now, self._pools.pop(node), -1)
            self._tenant.pop(node, None)
            self._tails.pop(node, None)

    def _place(self, decision: do.Place) -> None:
        run = self._live[decision.job]
        run.go_on(self.now)
        run.homes = (decision.rollout, decision.train)

    def _suspend(self, decision: do.Suspend) -> None:
        run = self._live[decision.job]
        run.wait(self.now, clock_runs=False)
        run.moving = True

    def _wait(self, decision: do.Wait) -> None:
        """A new job waits already. Any other job has lost its nodes."""
        run = self._live[decision.job]
        if run.waits_since is None:
            run.wait(self.now, clock_runs=True)
            run.moving, run.token = True, -1

    def _permit(self, decision: do.Permit) -> None:
        run = self._live[decision.job]
        run.token, run.phase, run.epoch = decision.token, decision.phase, decision.epoch
        seconds = self._phase_seconds(run, decision)
        run.began, run.end_at, run.tailing = self.now, self.now + seconds, False
        if decision.phase == "rollout":
            self._at(self.now + TAIL_TIME * seconds, self._reach_tail, run, run.token)
        self._at(run.end_at, self._end_phase, run, run.token, decision.nodes)

    def _phase_seconds(self, run: Running, decision: do.Permit) -> float:
        job, settings = run.job.spec.id, self._scheduler.settings
        seconds = run.seconds()
        if any(self._tenant.get(node, job) != job for node in decision.nodes):
            seconds += settings.warm_s
        tail_end = max(self._tails.get(node, 0.0) for node in decision.nodes)
        seconds += extra_beside(seconds, tail_end - self.now)
        for node in decision.nodes:
            self._tenant[node] = job
        return seconds

    def _reach_tail(self, run: Running, token: int) -> None:
        if run.token == token:
            self._post(ev.TailReached(job=run.job.spec.id))

    def _release_tail(self, decision: do.ReleaseTail) -> None:
        run = self._live[decision.job]
        run.tailing = True
        extra = TAIL_COST * (run.end_at - run.began)
        used_s, nodes = self.meter.used_s, len(decision.nodes)
        used_s[0] += (self.now - run.began) * nodes
        used_s[0] += TAIL_ENGINES * (run.end_at + extra - self.now) * nodes
        run.end_at += extra
        for node in decision.nodes:
            self._tails[node] = run.end_at
        self._at(run.end_at, self._end_phase, run, run.token, decision.nodes)

    def _end_phase(self, run: Running, token: int, nodes: tuple[str, ...]) -> None:
        if run.token != token or self.now < run.end_at:
            return
        pool = POOL_NAMES.index(run.phase)
        if not run.tailing:
            self.meter.used_s[pool] += (self.now - run.began) * len(nodes)
        name = run.job.spec.id
        self._log.write(
            self.now, "end", name, phase=run.phase, nodes=list(nodes), epoch=run.epoch, token=token
        )
        seconds, phase = run.seconds(), run.phase
        run.token = -1
        last = phase == "train" and run.last
        if phase == "train":
            run.iterate()
        self._post(ev.PhaseFinished(job=name, phase=phase, seconds=seconds, token=token))
        if last:
            self._finish(run)
        elif not run.moving:
            run.phase = "train" if phase == "rollout" else "rollout"
            self._ask(run)

    def _finish(self, run: Running) -> None:
        spec = run.job.spec
        elapsed = self.now - run.job.arrival_s
        self.results.append(
            FinishedJob(
                spec.id,
                elapsed,
                run.job.solo_s,
                spec.slo,
                waited_s=run.waited_s,
                uncounted_s=run.uncounted_s,
                ended=self.now,
            )
        )
        del self._live[spec.id]
        self._post(ev.JobEnded(job=spec.id))

    def _move(self, decision: do.Move) -> None:
        run = self._live[decision.job]
        run.go_on(self.now)
        run.moving = True
        run.token = -1
        run.homes = (decision.rollout, decision.train)
        done = self.now + self._scheduler.settings.cold_s
        run.end_at = done
        self._at(done, self._end_move, run, run.homes)

    def _end_move(self, run: Running, homes: tuple[tuple[str, ...], tuple[str, ...]]) -> None:
        name = run.job.spec.id
        if not run.moving or run.homes is not homes:
            return
        run.moving = False
        run.phase = "rollout"
        nodes = [*homes[0], *homes[1]]
        self._log.write(self.now, "end", name, phase="sync", nodes=nodes)
        self._post(ev.MoveFinished(job=name))
        self._ask(run)

    def _fail(self, pool: int) -> None:
        """The node of a pool with the most jobs dies."""
        nodes = [
            node
            for node in self._scheduler.cluster.nodes.values()
            if node.pool == pool and node.held
        ]
        if not nodes:
            return
        node = max(nodes, key=lambda each: (len(each.pins), each.name)).name
        self.meter.change(self.now, self._pools.pop(node), -1)
        self._happen(ev.NodeFailed(node=node))


_PERFORM: dict[type, Callable[..., None]] = {
    do.AcquireNodes: ClusterSimulation._acquire,
    do.ReleaseNodes: ClusterSimulation._release,
    do.Place: ClusterSimulation._place,
    do.Permit: ClusterSimulation._permit,
    do.ReleaseTail: ClusterSimulation._release_tail,
    do.Move: ClusterSimulation._move,
    do.Suspend: ClusterSimulation._suspend,
    do.Wait: ClusterSimulation._wait,
}
