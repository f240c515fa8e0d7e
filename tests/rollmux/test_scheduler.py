"""The scheduler under any order of events: invariants, restarts, rollback, decision time."""

import json
import time
from dataclasses import replace

import numpy as np
import pytest
from cluster_worlds import small
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from rollpacker.rollmux import decisions as do
from rollpacker.rollmux import events as ev
from rollpacker.rollmux import interleave as il
from rollpacker.rollmux.cluster import Job
from rollpacker.rollmux.cluster_sim import ClusterSimulation
from rollpacker.rollmux.jobs import JobSpec
from rollpacker.rollmux.scheduler import Scheduler
from rollpacker.rollmux.settings import PLAIN, Settings
from rollpacker.rollmux.trace import Philly, philly


class Cluster:
    """A driver without time: whoever holds something may go on in any order."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.now = 0.0
        self.permits: dict[str, do.Permit] = {}
        self.moving: set[str] = set()
        self.idle: dict[str, str] = {}
        self.held: set[str] = set()
        self.tokens: list[int] = []
        self.tails: set[str] = set()
        self.count = 0

    def post(self, event: ev.Event) -> None:
        self.now += 7.0
        for made in self.scheduler.handle(self.now, event):
            self.perform(made)
        self.check()

    def perform(self, made: do.Decision) -> None:
        if isinstance(made, do.Permit):
            assert made.job not in self.permits
            assert made.job not in self.moving
            self.permits[made.job] = made
            self.tokens.append(made.token)
            self.tails.discard(made.job)
        elif isinstance(made, do.Move):
            self.permits.pop(made.job, None)
            self.idle.pop(made.job, None)
            self.moving.add(made.job)
        elif isinstance(made, do.AcquireNodes):
            assert not self.held & set(made.nodes)
            self.held |= set(made.nodes)
        elif isinstance(made, do.ReleaseNodes):
            assert set(made.nodes) <= self.held
            self.held -= set(made.nodes)
        elif isinstance(made, do.ReleaseTail):
            self.tails.add(made.job)

    def check(self) -> None:
        cluster = self.scheduler.cluster
        assert self.tokens == sorted(set(self.tokens))
        assert {node.name for node in cluster.nodes.values() if node.held} == self.held
        for node in cluster.nodes.values():
            assert node.pins, f"{node.name} is leaked"
            assert node.used_gb <= self.scheduler.settings.memory_cap_gb + 1e-6
            assert node.name in cluster.groups[node.group].nodes[node.pool]
        busy = [
            name
            for permit in self.permits.values()
            for name in permit.nodes
            if permit.job not in self.tails
        ]
        assert len(busy) == len(set(busy)), "two phases on a node"
        for group in cluster.groups.values():
            assert group.seats or any(
                cluster.nodes[name].pins for pool in group.nodes for name in pool
            )

    def arrive(self, data: st.DataObject) -> None:
        self.count += 1
        spec = JobSpec(
            id=f"j{self.count}",
            worst_rollout_s=data.draw(st.floats(20, 900)),
            worst_train_s=data.draw(st.floats(20, 500)),
            rollout_nodes=data.draw(st.sampled_from([1, 1, 2])),
            train_nodes=data.draw(st.sampled_from([1, 1, 2])),
            slo=data.draw(st.floats(1.0, 3.0)),
            iterations=data.draw(st.sampled_from([None, 3, 500])),
            rollout_memory_gb=data.draw(st.floats(100, 900)),
        )
        self.post(ev.JobArrived(spec=spec))
        self.idle[spec.id] = "rollout"

    def ask(self, name: str) -> None:
        self.post(ev.PermitRequested(job=name, phase=self.idle.pop(name)))

    def finish(self, name: str, share: float) -> None:
        permit = self.permits.pop(name)
        spec = self.scheduler.cluster.jobs[name].spec
        worst = spec.worst_rollout_s if permit.phase == "rollout" else spec.worst_train_s
        self.idle[name] = "train" if permit.phase == "rollout" else "rollout"
        self.post(
            ev.PhaseFinished(
                job=name, phase=permit.phase, seconds=worst * share, token=permit.token
            )
        )

    def arrived(self, name: str) -> None:
        self.moving.discard(name)
        self.idle[name] = "rollout"
        self.post(ev.MoveFinished(job=name))

    def lose(self, name: str) -> None:
        permit = self.permits.pop(name)
        self.idle[name] = permit.phase
        self.tails.discard(name)
        self.post(ev.PermitLost(job=name, token=permit.token))

    def end(self, name: str) -> None:
        for where in (self.permits, self.idle):
            where.pop(name, None)
        self.moving.discard(name)
        self.tails.discard(name)
        self.post(ev.JobEnded(job=name))

    def step(self, data: st.DataObject) -> None:
        """Any one thing that may happen now."""
        jobs = self.scheduler.cluster.jobs
        can: list[tuple[str, str]] = [("arrive", "")] if len(jobs) < 12 else []
        can += [("ask", name) for name in self.idle] * 3
        can += [("finish", name) for name in self.permits] * 4
        can += [("tail", name) for name, p in self.permits.items() if p.phase == "rollout"]
        can += [("arrived", name) for name in self.moving] * 2
        rare = data.draw(st.integers(0, 19))
        if rare == 0 and jobs:
            can = [("end", name) for name in jobs]
        elif rare == 1 and self.held:
            can = [("fail", node) for node in sorted(self.held)]
        elif rare == 2 and self.permits:
            can = [("lose", name) for name in self.permits]
        elif rare == 3 and self.scheduler.next_look() < 1e9:
            can = [("wait", "")]
        what, name = data.draw(st.sampled_from(can))
        if what == "arrive":
            self.arrive(data)
        elif what == "finish":
            self.finish(name, data.draw(st.sampled_from([0.3, 0.6, 0.9, 1.0])))
        elif what == "tail":
            self.post(ev.TailReached(job=name))
        elif what == "wait":
            self.now = max(self.now, self.scheduler.next_look())
            self.post(ev.TimePassed())
            assert self.scheduler.next_look() > self.now
        elif what == "fail":
            self.held.discard(name)
            self.tails -= set(self.scheduler.cluster.nodes[name].pins)
            self.post(ev.NodeFailed(node=name))
        else:
            {"ask": self.ask, "arrived": self.arrived, "lose": self.lose, "end": self.end}[what](
                name
            )


@pytest.mark.parametrize("how", [Settings(), PLAIN], ids=["ours", "plain"])
@settings(max_examples=settings().max_examples // 6, phases=[Phase.generate])
@given(data=st.data())
def test_invariants_hold_whatever_happens(how: Settings, data: st.DataObject) -> None:
    world = Cluster(Scheduler(how))
    for _ in range(80):
        world.step(data)
    for name in list(world.scheduler.cluster.jobs):
        world.end(name)
    assert world.held == set()
    assert not world.scheduler.cluster.groups
    assert not world.scheduler.cluster.nodes


@settings(max_examples=settings().max_examples // 25, phases=[Phase.generate])
@given(data=st.data())
def test_nobody_starves(data: st.DataObject) -> None:
    """When everybody goes on as fast as possible, everybody makes iterations."""
    world = Cluster(Scheduler(Settings()))
    for _ in range(6):
        world.arrive(data)
    for _ in range(1500):
        if world.idle:
            world.ask(next(iter(world.idle)))
        elif world.permits:
            world.finish(min(world.permits, key=lambda n: world.permits[n].token), 0.8)
        else:
            world.arrived(next(iter(world.moving)))
    assert all(job.done > 0 for job in world.scheduler.cluster.jobs.values())


def recorded(how: Settings) -> list[tuple[float, ev.Event]]:
    events: list[tuple[float, ev.Event]] = []

    class Recorder(Scheduler):
        def handle(self, now: float, event: ev.Event) -> list[do.Decision]:
            events.append((now, event))
            return super().handle(now, event)

    failures = [(6000.0, 0), (12000.0, 1)]
    ClusterSimulation(small(1, mean_hours=1.0), Recorder(how), failures=failures).run()
    return events


@pytest.mark.parametrize("how", [Settings(), PLAIN], ids=["ours", "plain"])
def test_a_scheduler_killed_at_any_transition_goes_on_as_if_nothing_had_happened(
    how: Settings,
) -> None:
    events = recorded(how)
    straight, restarted = Scheduler(how), Scheduler(how)
    for number, (now, event) in enumerate(events):
        if number % 3 == 0:
            state = json.loads(json.dumps(restarted.state_dict()))
            restarted = Scheduler(how)
            restarted.load_state_dict(state)
        assert restarted.handle(now, event) == straight.handle(now, event), number
    assert len(events) > 1000


def busy_scheduler(jobs: int = 12, seed: int = 0) -> Scheduler:
    """Jobs in their groups, all known and long."""
    scheduler = Scheduler(Settings())
    rng = np.random.default_rng(seed)
    for each in philly(Philly(jobs=jobs, nodes="mixed", mean_hours=30.0), rng):
        scheduler.handle(0.0, ev.JobArrived(spec=each.spec))
        live = scheduler.cluster.jobs[each.spec.id]
        for pair in zip(each.rollout_s[:8], each.train_s[:8], strict=False):
            live.observed.add(float(pair[0]), float(pair[1]))
    return scheduler


def test_a_move_of_several_that_fails_rolls_back_to_the_bit() -> None:
    scheduler = busy_scheduler()
    cluster, moves = scheduler.cluster, scheduler._moves
    before = json.dumps(scheduler.state_dict())
    jobs = [job for job in cluster.jobs.values() if job.home is not None][:4]
    groups = list(cluster.groups.values())
    for number, job in enumerate(jobs):
        target = next(g for g in groups[number:] if job.home and g.id != job.home.group)
        sites = list(scheduler.placement.sites(job, target, (0.0, 0.0)))
        site = sites[-1] if sites and number % 2 else scheduler.placement.isolated(job)
        moves.reserve(job, site)
    assert json.dumps(scheduler.state_dict()) != before
    for job in reversed(jobs):
        moves.cancel(job)
    assert json.dumps(scheduler.state_dict()) == before


@pytest.mark.parametrize("seed", range(4))
def test_placement_is_as_cheap_as_trying_everything(seed: int) -> None:
    scheduler = busy_scheduler(5, seed)
    new = philly(Philly(jobs=1, mean_hours=30.0), np.random.default_rng(100 + seed))[0]
    job = Job(replace(new.spec, id="new"), 0.0)
    scheduler.cluster.jobs["new"] = job
    scheduler.admission.left = 1e9
    placement = scheduler.placement
    alone = placement.isolated(job)
    offer = placement.best(job, 0.0, below=alone.price, thorough=True)
    every = [
        placement.cost(site, job, 0.0)
        for group in scheduler.cluster.groups.values()
        for site in placement.sites(job, group, (0.0, 0.0))
    ]
    best = min([*every, alone.price])
    assert (alone.price if offer is None else offer.cost) == pytest.approx(best)


def test_a_triangle_is_rejected_at_twenty() -> None:
    """Three gangs of two on three nodes: the formula would let them in."""
    scheduler = Scheduler(PLAIN)
    seats = []
    for n, mask in enumerate((3, 6, 5)):
        spec = JobSpec(
            id=f"g{n}", worst_rollout_s=10.0, worst_train_s=0.5, rollout_nodes=2, slo=25.0 / 10.5
        )
        scheduler.handle(0.0, ev.JobArrived(spec=spec))
        seats.append(scheduler.admission.seat(scheduler.cluster.jobs[spec.id], (mask, 1), (1, 1)))
    assert il.load_bound(seats) == pytest.approx(20.0)
    assert not scheduler.admission.judge(seats, 0.0).kept
    assert scheduler.admission.judge(seats[:2], 0.0).kept


def test_an_old_token_is_refused() -> None:
    scheduler = Scheduler(Settings())
    spec = JobSpec(id="a", worst_rollout_s=10.0, worst_train_s=5.0)
    scheduler.handle(0.0, ev.JobArrived(spec=spec))
    first = scheduler.handle(0.0, ev.PermitRequested(job="a", phase="rollout"))[-1]
    assert isinstance(first, do.Permit)
    scheduler.handle(1.0, ev.PermitLost(job="a", token=first.token))
    second = scheduler.handle(1.0, ev.PermitRequested(job="a", phase="rollout"))[-1]
    assert isinstance(second, do.Permit)
    assert second.token > first.token
    late = ev.PhaseFinished(job="a", phase="rollout", seconds=9.0, token=first.token)
    assert scheduler.handle(2.0, late) == []
    assert scheduler.cluster.jobs["a"].token == second.token


def test_a_departure_delays_nobody() -> None:
    """Round-robin: those who stay are ahead of their plan when somebody leaves."""
    from cluster_worlds import job, run

    stay = [job(f"s{n}", [60.0] * 40, [20.0] * 40, slo=3.0, slack=1.0) for n in range(2)]
    leaver = job("z", [60.0] * 10, [20.0] * 10, slo=3.0, slack=1.0)
    together = run([*stay, job("z", [60.0] * 40, [20.0] * 40, slo=3.0, slack=1.0)], PLAIN)[0]
    left = run([*stay, leaver], PLAIN)[0]
    ends = [{r.id: r.elapsed_s for r in result.jobs} for result in (together, left)]
    for each in stay:
        assert ends[1][each.spec.id] <= ends[0][each.spec.id] + 1e-6


def test_hundreds_of_groups_are_scanned() -> None:
    """More than the table begins with."""
    scheduler = Scheduler(Settings())
    for n in range(200):
        spec = JobSpec(id=f"j{n}", worst_rollout_s=100.0, worst_train_s=50.0, slo=1.0)
        scheduler.handle(float(n), ev.JobArrived(spec=spec))
    assert len(scheduler.cluster.groups) == 200
    easy = JobSpec(id="easy", worst_rollout_s=100.0, worst_train_s=50.0, slo=9.0, iterations=500)
    placed = scheduler.handle(200.0, ev.JobArrived(spec=easy))
    assert any(isinstance(each, do.Place) for each in placed)


def test_wrong_arrivals_are_the_users_mistake() -> None:
    scheduler = Scheduler(Settings())
    spec = JobSpec(id="a", worst_rollout_s=10.0, worst_train_s=5.0)
    scheduler.handle(0.0, ev.JobArrived(spec=spec))
    with pytest.raises(ValueError, match="one of this id"):
        scheduler.handle(0.0, ev.JobArrived(spec=spec))
    big = JobSpec(id="b", worst_rollout_s=1.0, worst_train_s=1.0, train_memory_gb=9999.0)
    with pytest.raises(ValueError, match="more host memory"):
        scheduler.handle(0.0, ev.JobArrived(spec=big))


@pytest.mark.slow
def test_decisions_are_fast_with_a_thousand_live_jobs() -> None:
    jobs = philly(Philly(jobs=1000, days=0.05, mean_hours=3.0), np.random.default_rng(0))
    simulation = ClusterSimulation(jobs, Scheduler(Settings()), clock=time.process_time)
    result = simulation.run()
    assert result.to_json()["decision_ms"]["p99"] < 10.0
