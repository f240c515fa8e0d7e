"""When engines are told to decode ahead."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from policy_world import World, local_machine
from policy_world import settings as make_settings

from rollpacker.core import decisions as do
from rollpacker.core import events as ev
from rollpacker.core.types import EngineId, ReplicaId, RoundKind
from rollpacker.policy.engines.hardware import LatencyCurve, RowCosts
from rollpacker.policy.engines.speculation import MOST, gain
from rollpacker.policy.rollout import RolloutPolicy

ROWS = RowCosts(free=4, each=0.05)


def world(mode: str = "exact", *, rows: RowCosts | None = ROWS, ahead: str = "auto") -> World:
    rollout = {
        "prompts_per_step": 4,
        "num_generations": 2,
        "tail_batching": {"mode": mode, "eta_prompts": 2.0, "audit_every": 0},
        "speculation": {"mode": ahead},
    }
    return World(make_settings(rollout, {"a": 40}, rows=rows), workers=2)


def end_step(job: World, **drafts: int) -> None:
    while not job.over:
        if job.running:
            job.finish(min(job.running), **drafts)
        elif job.grading:
            job.grade(min(job.grading), float(len(job.graded) % 2))
        elif job.stopping:
            job.confirm_abort(min(job.stopping))
        elif job.gradients:
            job.sum_gradients(0)
        else:
            job.apply()


def told(job: World) -> list[do.Speculate]:
    return [d for _, made in job.log for d in made if isinstance(d, do.Speculate)]


def test_every_engine_is_told_before_its_first_attempt() -> None:
    job = world()
    job.start()
    made = [type(d) for _, decisions in job.log for d in decisions]
    assert made.index(do.Speculate) < made.index(do.StartAttempt)
    assert [d.engine for d in told(job)] == [0, 1]
    assert {(d.most, d.free, d.row_cost) for d in told(job)} == {(MOST, 4, 0.05)}
    (below,) = {d.below for d in told(job)}
    assert gain(below, 22 / 32, ROWS) >= 1.15 > gain(below + 1, 22 / 32, ROWS)


def test_not_where_it_is_off_nor_where_engines_cannot() -> None:
    for job in (world(ahead="off"), world(rows=None), world("off")):
        job.start()
        end_step(job, verifications=9, drafted=10, accepted=1)
        assert not told(job)


def test_predictable_responses_win_no_races() -> None:
    job = world("race")
    kinds = set()
    for _ in range(6):
        before = len(told(job))
        job.start()
        end_step(job)
        kinds.add(job.kind)
        assert (len(told(job)) > before) == (job.kind is RoundKind.LONG)
    assert kinds == {RoundKind.SHORT, RoundKind.LONG}


def test_what_is_not_accepted_is_drafted_later_and_that_outlives_the_job() -> None:
    job = world()
    job.start()
    end_step(job, verifications=450, drafted=500, accepted=50)
    steps = [d.below for d in told(job)]
    assert steps == sorted(steps, reverse=True)
    assert told(job)[-1].below <= 3
    state = job.policy.state_dict()
    job.policy = RolloutPolicy(job.settings)
    job.policy.load_state_dict(state)
    before = len(told(job))
    job.start()
    assert told(job)[before].below <= 3


def timed(job: World, each: float, sizes: tuple[int, ...] = (1, 4, 16, 64)) -> None:
    """The engines' steps took a millisecond, and ``each`` of it more for each row."""
    rows = tuple((n, 1e-3 * (1.0 + each * n)) for n in sizes)
    job.tell(ev.DecodeTimed(step=0, rows=rows))


def test_what_rows_cost_at_work_counts_more_than_what_they_cost_at_the_start() -> None:
    job = world(rows=RowCosts(free=1, each=0.3))
    job.start()
    first = told(job)[-1]
    end_step(job, verifications=3, drafted=30, accepted=27)
    timed(job, 0.02)
    job.start()
    assert told(job)[-1].row_cost == pytest.approx(0.02, rel=0.03)
    assert told(job)[-1].below > 2 * first.below
    end_step(job)
    state = job.policy.state_dict()
    job.policy = RolloutPolicy(job.settings)
    job.policy.load_state_dict(state)
    job.start()
    assert told(job)[-1].row_cost == pytest.approx(0.02, rel=0.03)


def test_a_draft_that_is_right_to_its_end_is_no_refusal() -> None:
    below = []
    for accepted in (1595, 1300):
        job = world()
        job.start()
        end_step(job, verifications=400, drafted=1600, accepted=accepted)
        below.append(told(job)[-1].below)
    assert below[0] > 1.5 * below[1]


def test_what_another_process_measured_is_not_taken_up() -> None:
    job = world(rows=RowCosts(free=1, each=0.3))
    job.start()
    end_step(job)
    timed(job, 0.4)
    other = world()
    other.policy.load_state_dict(job.policy.state_dict())
    other.start()
    assert told(other)[-1].row_cost == ROWS.each


def test_a_few_sizes_of_steps_do_not_say_what_a_row_costs() -> None:
    job = world()
    job.start()
    end_step(job)
    timed(job, 0.4, (16, 20, 4096))
    job.start()
    assert told(job)[-1].row_cost == ROWS.each


def test_what_is_nearly_always_right_is_drafted_of_many() -> None:
    job = world()
    for _ in range(2):
        job.start()
        end_step(job, verifications=100, drafted=1600, accepted=1500)
    assert told(job)[-1].below > 2 * told(job)[0].below


@given(st.floats(0.0, 0.999), st.floats(1e-4, 0.5), st.integers(0, 64))
def test_where_many_gain_fewer_gain_too(accepted: float, each: float, free: int) -> None:
    """Which the search for the most of them goes by; the length of drafts is a whole number."""
    rows = RowCosts(free=free, each=each)
    gains = [gain(batch, accepted, rows) for batch in (1, 4, 16, 64, 256)]
    assert all(fewer > 1.05 for fewer, more in pairwise(gains) if more >= 1.15)
    assert gains[0] <= 1.0 + MOST


def test_an_engine_that_died_is_told_nothing() -> None:
    job = world()
    job.start()
    job.lose_devices([EngineId(1)], [ReplicaId(1)])
    before = len(told(job))
    end_step(job, verifications=500, drafted=500, accepted=0)
    assert {d.engine for d in told(job)[before:]} == {0}


def test_an_engine_that_is_formed_is_told() -> None:
    """Tail to an engine of both devices: it is told, and its members are not told any more."""
    rollout = {"prompts_per_step": 4, "num_generations": 2, "streaming": {"scaling": "paper"}}
    machine = local_machine(2)
    given = make_settings(rollout, {"a": 40}, rows=ROWS, machine=machine)
    policy = RolloutPolicy(given)
    started = ev.StepStarted(
        step=0,
        engines=(EngineId(0), EngineId(1)),
        replicas=(ReplicaId(0), ReplicaId(1)),
        remaining={"a": 40},
    )
    policy.handle(0.0, started)
    made = policy._speculating.formed(
        do.FormEngine(engine=EngineId(0), members=(EngineId(0), EngineId(1)))
    )
    assert [d.engine for d in made] == [0]
    assert list(policy._speculating._told) == [0]


def test_what_rows_cost() -> None:
    line = {n: 1e-3 + 2e-5 * n for n in (1, 4, 16, 64)}
    assert LatencyCurve(line).rows().each == pytest.approx(0.02, rel=0.03)
    assert LatencyCurve(line).rows().free == 8
    flat = LatencyCurve({1: 2e-3, 64: 2e-3}).rows()
    assert (flat.free, flat.each) == (64, LatencyCurve({8: 1e-3}).rows().each)
    bound_by_memory = {1: 30.7, 4: 34.7, 16: 108.8, 32: 214.3, 64: 392.3}
    assert LatencyCurve(bound_by_memory).rows().free == 4
    assert LatencyCurve(bound_by_memory).rows().each == pytest.approx(0.19, abs=0.01)
    noisy = {1: 3.4e-4, 4: 1.9e-4, 16: 2.6e-4, 32: 3.5e-4, 64: 6.8e-4}
    assert 0.01 < LatencyCurve(noisy).rows().each < 0.1
