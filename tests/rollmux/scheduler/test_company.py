"""Company that a tight job can keep, and swaps between groups."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cluster_worlds import job, run

from rollpacker.rollmux.model import decisions as do
from rollpacker.rollmux.model import events as ev
from rollpacker.rollmux.model.seat import ROLLOUT, TRAIN, Seat, SeatState
from rollpacker.rollmux.model.settings import Settings
from rollpacker.rollmux.placement.permit_order import earliest_deadline
from rollpacker.rollmux.record.trace import Philly, philly
from rollpacker.rollmux.scheduler.repack import RepackStep
from rollpacker.rollmux.scheduler.scheduler import Scheduler
from rollpacker.rollmux.scheduler.slo_guard import CERTAIN, SloGuard


def tight_and_guest() -> list[Seat]:
    """One that has just rolled out, for 100 seconds, and one that waits for the same node."""
    tight = Seat("tight", (1, 1), 100.0, 60.0, 1.02)
    tight.start(ROLLOUT, 0.0)
    tight.finish(ROLLOUT, 100.0)
    return [tight, Seat("guest", (2, 1), 60.0, 90.0, 3.0, state=SeatState.WAIT_T)]


def test_a_guest_is_held_back_for_who_has_just_finished_a_rollout() -> None:
    """Between the end of a rollout and the request to train, however the events are ordered."""
    tight, guest = tight_and_guest()
    assert earliest_deadline([tight, guest], TRAIN, 100.0) is None
    tight.ask()
    assert earliest_deadline([tight, guest], TRAIN, 100.0) is tight


def test_a_guest_is_not_held_back_for_ever() -> None:
    tight, guest = tight_and_guest()
    assert earliest_deadline([tight, guest], TRAIN, 200.0) is guest


@pytest.mark.parametrize(("slack", "leaves"), [(150.0, True), (200.0, False)])
def test_a_job_leaves_while_it_can_pay_a_cold_start(slack: float, leaves: bool) -> None:
    """Its next wait is 79 s, and 110 s load it on other nodes."""
    seat: Any = SimpleNamespace(masks=(1, 1), anchor=-110.0, solo=100.0)
    other: Any = SimpleNamespace(masks=(1, 1), state=SeatState.WAIT_T, seconds=lambda _pool: 20.0)
    late: Any = SimpleNamespace(home=SimpleNamespace(group=0), seat=seat, destination=None)
    late.observed = SimpleNamespace(known=True, means=(60.0, 40.0))
    late.spec, late.remaining = SimpleNamespace(slo=2.0), lambda: 10
    late.solo_s, late.started = 0.0, slack - CERTAIN * 1000.0
    cluster: Any = SimpleNamespace(groups=[SimpleNamespace(seats=[seat, other])])
    admission: Any = SimpleNamespace(few=False)
    settings = Settings(cold_s=110.0, warm_s=2.0)
    assert SloGuard(cluster, settings, admission).must_leave(late, 0.0) is leaves


def test_what_is_rehearsed_is_what_happens() -> None:
    """Without noise, tails and switches: a job that may be slowed by 5% shares a training node."""
    exact = Settings(tails=False, warm_s=0.0, repack=False)
    jobs = [
        job("tight", [200.0] * 300, [100.0] * 300, slo=1.05, slack=1.0),
        job("guest", [90.0] * 300, [150.0] * 300, arrival=1.0, slo=2.0, slack=1.0),
    ]
    result, violations, text = run(jobs, exact)
    assert violations == []
    assert '"evict"' not in text
    shared = [line for line in text.splitlines() if '"place"' in line and '"t0"' in line]
    assert len(shared) == 2
    assert {each.id: each.ratio for each in result.jobs}["tight"] < 0.99


def values(scheduler: Scheduler) -> float:
    groups = scheduler.cluster.groups.values()
    return sum(scheduler.placement.value(group, 0.0) for group in groups)


@pytest.mark.parametrize("nodes", ["1", "mixed"])
def test_swaps_save_what_they_promise(nodes: str) -> None:
    """Of two groups' value, once nothing else helps; both jobs get a seat and memory."""
    swaps = 0
    for seed in range(6):
        scheduler = Scheduler(Settings())
        config = Philly(jobs=12, nodes=nodes, mean_hours=60.0)
        for each in philly(config, np.random.default_rng(seed)):
            scheduler.handle(0.0, ev.JobArrived(spec=each.spec))
            live = scheduler.cluster.jobs[each.spec.id]
            for pair in zip(each.rollout_s[:20], each.train_s[:20], strict=False):
                live.observed.add(float(pair[0]), float(pair[1]))
        repack = scheduler._repack
        for live in list(scheduler.cluster.jobs.values()):
            assert live.home is not None
            before = values(scheduler)
            scheduler.admission.left = 50.0
            moved = repack._move(RepackStep("swap", live.spec.id, live.home.group, 24), 0.0)
            swaps += bool(moved)
            assert values(scheduler) <= before + 1e-6
            assert all(each.destination and each.next_seat for each in moved)
    assert swaps > 0


def test_a_swap_goes_on_where_the_budget_ended() -> None:
    scheduler = Scheduler(Settings())
    for each in philly(Philly(jobs=12, mean_hours=60.0), np.random.default_rng(0)):
        scheduler.handle(0.0, ev.JobArrived(spec=each.spec))
    scheduler._repack.everything()
    seen: set[int] = set()
    for _ in range(400):
        made = scheduler.handle(0.0, ev.TimePassed())
        for decision in made:
            if isinstance(decision, do.Move):
                scheduler.handle(0.0, ev.MoveFinished(job=decision.job))
        seen |= {task.left for task in scheduler._repack.agenda if task.kind == "swap"}
    assert not len(scheduler._repack.agenda)
    assert len(seen) > 1
