"""The scheduler under any order of events: invariants, restarts, rollback, decision time."""

import time

import numpy as np
import pytest
from cluster_worlds import small
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from scheduler_world import World, reborn

from rollpacker.core.codec import dumps_finite
from rollpacker.rollmux.model import decisions as do
from rollpacker.rollmux.model import events as ev
from rollpacker.rollmux.model.cluster import Job
from rollpacker.rollmux.model.jobs import JobSpec
from rollpacker.rollmux.model.settings import Settings
from rollpacker.rollmux.record.trace import Philly, philly
from rollpacker.rollmux.scheduler.scheduler import Scheduler
from rollpacker.rollmux.simulation.cluster_sim import ClusterSimulation


@settings(max_examples=settings().max_examples // 6, phases=[Phase.generate])
@given(data=st.data())
def test_invariants_hold_whatever_happens(data: st.DataObject) -> None:
    world = World(Scheduler(Settings()))
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
    world = World(Scheduler(Settings()))
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


def recorded() -> list[tuple[float, ev.Event]]:
    events: list[tuple[float, ev.Event]] = []

    class Recorder(Scheduler):
        def handle(self, now: float, event: ev.Event) -> list[do.Decision]:
            events.append((now, event))
            return super().handle(now, event)

    failures = [(6000.0, 0), (12000.0, 1)]
    ClusterSimulation(small(1, mean_hours=1.0), Recorder(Settings()), failures=failures).run()
    return events


def test_a_scheduler_killed_at_any_transition_goes_on_as_if_nothing_had_happened() -> None:
    events = recorded()
    straight, restarted = Scheduler(Settings()), Scheduler(Settings())
    for number, (now, event) in enumerate(events):
        if number % 3 == 0:
            restarted = reborn(restarted)
        assert restarted.handle(now, event) == straight.handle(now, event), number
        assert restarted.next_look() == straight.next_look()
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
    cluster, moves = scheduler.cluster, scheduler._reservations
    before = dumps_finite(scheduler.snapshot())
    jobs = [job for job in cluster.jobs.values() if job.home is not None][:4]
    groups = list(cluster.groups.values())
    for number, job in enumerate(jobs):
        target = next(g for g in groups[number:] if job.home and g.id != job.home.group)
        sites = list(scheduler.placement.sites(job, target, (0.0, 0.0), now=0.0))
        site = sites[-1] if sites and number % 2 else scheduler.placement.isolated(job, 0.0)
        moves.reserve(job, site)
    assert dumps_finite(scheduler.snapshot()) != before
    for job in reversed(jobs):
        moves.cancel(job)
    assert dumps_finite(scheduler.snapshot()) == before


@pytest.mark.parametrize("seed", range(4))
def test_placement_is_as_cheap_as_trying_everything(seed: int) -> None:
    scheduler = busy_scheduler(5, seed)
    new = philly(Philly(jobs=1, mean_hours=30.0), np.random.default_rng(100 + seed))[0]
    job = Job(replace(new.spec, id="new"), 0.0)
    scheduler.cluster.jobs["new"] = job
    scheduler.admission.left = 1e9
    placement = scheduler.placement
    alone = placement.isolated(job, 0.0)
    offer = placement.best(job, 0.0, below=alone.price, thorough=True)
    every = [
        placement.cost(site, job, 0.0)
        for group in scheduler.cluster.groups.values()
        for site in placement.sites(job, group, (0.0, 0.0), now=0.0)
    ]
    best = min([*every, alone.price])
    assert (alone.price if offer is None else offer.cost) == pytest.approx(best)


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
    with pytest.raises(ValueError, match="this id is in use"):
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
