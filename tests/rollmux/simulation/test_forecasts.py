"""When jobs that wait are expected to start: runs ahead, and the middle of them."""

import math
from collections.abc import Collection
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
from cluster_worlds import run_on
from msgspec import structs

from rollpacker.core.codec import dumps_finite
from rollpacker.rollmux.model import decisions as do
from rollpacker.rollmux.model import events as ev
from rollpacker.rollmux.model.inventory import Fixed, Machine
from rollpacker.rollmux.model.jobs import JobSpec
from rollpacker.rollmux.model.seat import SeatState
from rollpacker.rollmux.model.settings import Settings
from rollpacker.rollmux.record.trace import Philly, TraceJob, philly
from rollpacker.rollmux.scheduler.scheduler import Scheduler
from rollpacker.rollmux.simulation.arrivals import LATELY_S, NOBODY, Arrivals, lately
from rollpacker.rollmux.simulation.forecast import EVENTS, _Ahead, expected_starts, forecast

MACHINES = [
    Machine(name=f"{pool}{n}", pool=pool) for pool in ("rollout", "train") for n in range(8)
]


class Forecasting(Scheduler):
    """Says of every job that waits when it will start, and hears when it did."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings, Fixed(MACHINES))
        self.said: dict[str, tuple[float, list[float]]] = {}
        self.found: dict[str, tuple[list[float], float]] = {}
        """Seconds of waiting as runs ahead said, and as they were."""

    def handle(self, now: float, event: ev.Event) -> list[do.Decision]:
        made = super().handle(now, event)
        for each in made:
            if isinstance(each, do.Wait):
                self.said[each.job] = now, self.ahead(each.job, now)
            elif isinstance(each, do.Place) and each.job in self.said:
                at, waits = self.said.pop(each.job)
                self.found[each.job] = waits, now - at
        return made

    def ahead(self, job: str, now: float) -> list[float]:
        if self.said:
            runs = [forecast(self, now, number=number, job=job) for number in range(2)]
            return [run[job] for run in runs]
        before = dumps_finite(self.snapshot())
        runs = [forecast(self, now, number=number)[job] for number in (0, 1, 1)]
        assert runs[1] == runs[2]
        assert dumps_finite(self.snapshot()) == before
        return runs[:2]


@pytest.mark.wide
def test_promises_hold_on_few_nodes_and_forecasts_are_near() -> None:
    shape = Philly(jobs=24, days=0.25, nodes="mixed", mean_hours=2.0)
    scheduler = Forecasting(Settings(margin=0.08, nodes="named"))
    result, violations = run_on(philly(shape, np.random.default_rng(3)), scheduler)
    assert violations == []
    assert result.to_json()["slo_attained"] == 1.0
    errors = [abs(np.mean(said) - was) / was for said, was in scheduler.found.values()]
    assert len(errors) > 5
    assert np.median(errors) < 0.25
    assert any(len(set(said)) > 1 for said, _ in scheduler.found.values())


class Foreseeing(Scheduler):
    """Runs ahead when so many phases are over."""

    def __init__(self, settings: Settings, at: Collection[int]) -> None:
        super().__init__(settings, Fixed(MACHINES))
        self.at = at
        self.phases = 0
        self.said: list[tuple[float, dict[str, float]]] = []
        self.placed: dict[str, float] = {}
        self.tails = self.reserved = self.going = 0

    def handle(self, now: float, event: ev.Event) -> list[do.Decision]:
        made = super().handle(now, event)
        self.placed |= {each.job: now for each in made if isinstance(each, do.Place)}
        if isinstance(event, ev.PhaseFinished):
            self.phases += 1
            if self.phases in self.at:
                self.look(now)
        return made

    def look(self, now: float) -> None:
        placed = [job for job in self.cluster.jobs.values() if job.home is not None]
        seen = [job.observed for job in placed]
        if not all(each.count for each in seen) or not any(each.known for each in seen):
            return  # what they take has to be guessed
        at, self.at = self.at, ()  # the copy that is run ahead must not look too
        self.said.append((now, forecast(self, now)))
        self.at = at
        for job in self.cluster.jobs.values():
            seat = job.seat
            self.tails += seat is not None and seat.state is SeatState.RUN_R and not seat.busy
            self.reserved += job.destination is not None
            self.going += job.going


def predictable(seed: int) -> list[TraceJob]:
    """Jobs that have all come before the first iterations are over, and always take their worst
    case."""
    shape = Philly(jobs=20, days=0.01, nodes="mixed", mean_hours=1.0)
    return [
        replace(
            job,
            rollout_s=np.full_like(job.rollout_s, job.spec.worst_rollout_s),
            train_s=np.full_like(job.train_s, job.spec.worst_train_s),
        )
        for job in philly(shape, np.random.default_rng(seed))
    ]


@pytest.mark.parametrize("seed", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_where_nothing_is_left_to_chance_a_run_ahead_is_what_happens(seed: int) -> None:
    """But for which job a free node was switched to last, which nobody keeps."""
    scheduler = Foreseeing(Settings(nodes="named", warm_s=0.0), range(60, 400, 11))
    run_on(predictable(seed), scheduler)
    assert len(scheduler.said) > 10
    assert min(scheduler.tails, scheduler.reserved) > 0
    assert scheduler.going or seed == 0
    for now, said in scheduler.said:
        assert said == pytest.approx({job: scheduler.placed[job] - now for job in said})


def test_who_never_starts_and_who_is_not_waited_for() -> None:
    scheduler = Scheduler(Settings(nodes="named"), Fixed([MACHINES[0], MACHINES[8]]))
    spec = JobSpec(id="a", worst_rollout_s=100.0, worst_train_s=50.0, slo=1.0, iterations=4)
    scheduler.handle(0.0, ev.JobArrived(spec=spec))
    scheduler.handle(0.0, ev.JobArrived(spec=structs.replace(spec, id="b")))
    huge = structs.replace(spec, id="huge", rollout_nodes=2, too_large="wait")
    scheduler.handle(0.0, ev.JobArrived(spec=huge))
    scheduler.handle(0.0, ev.JobArrived(spec=structs.replace(spec, id="c")))
    said = forecast(scheduler, 0.0)
    assert said["huge"] == math.inf
    assert 300.0 < said["b"] < said["c"] < math.inf
    assert forecast(scheduler, 0.0, job="b") == said | {"c": math.inf}
    assert set(forecast(scheduler, 0.0, events=1).values()) == {math.inf}
    assert forecast(scheduler, 0.0, job="huge")["b"] == math.inf


def test_nobody_is_waited_for_behind_a_job_without_end() -> None:
    scheduler = Scheduler(Settings(nodes="named"), Fixed([MACHINES[0], MACHINES[8]]))
    spec = JobSpec(id="a", worst_rollout_s=100.0, worst_train_s=50.0, slo=1.0)
    scheduler.handle(0.0, ev.JobArrived(spec=spec))
    scheduler.handle(0.0, ev.JobArrived(spec=structs.replace(spec, id="b")))
    assert forecast(scheduler, 0.0) == {"b": math.inf}


def test_behind_a_job_that_is_expected_to_end_there_is_a_forecast() -> None:
    scheduler = Scheduler(Settings(nodes="named"), Fixed([MACHINES[0], MACHINES[8]]))
    spec = JobSpec(id="a", worst_rollout_s=100.0, worst_train_s=50.0, slo=1.0)
    about = structs.replace(spec, expected_iterations=40)
    scheduler.handle(0.0, ev.JobArrived(spec=about))
    scheduler.handle(0.0, ev.JobArrived(spec=structs.replace(spec, id="b")))
    assert forecast(scheduler, 0.0)["b"] == pytest.approx(40 * 150.0 * 0.8)
    # It goes on though more are done than were expected, and may end with any.
    scheduler.cluster.jobs["a"].done = 90
    assert forecast(scheduler, 0.0)["b"] == pytest.approx(150.0 * 0.8)


def test_the_middle_of_runs_is_told_and_who_may_never_start_is_left_out() -> None:
    never = math.inf
    runs = [{"a": 3.0, "b": never}, {"a": 9.0, "b": never, "c": 1.0}, {"a": 4.0, "b": 5.0}]
    assert expected_starts(runs) == {"a": (4.0, 3.0, 9.0, 3), "c": (1.0, 1.0, 1.0, 1)}
    assert expected_starts(runs[:1]) == {"a": (3.0, 3.0, 3.0, 1)}
    assert expected_starts([]) == {}


def test_a_range_is_told_where_enough_runs_know_a_job() -> None:
    found = expected_starts([{"a": 3.0, "b": 1.0}, {"a": 5.0, "b": 2.0}, {"a": math.inf}])
    assert found["a"].between == (3.0, None)
    assert found["b"].between is None


def waiting_pair() -> tuple[Scheduler, JobSpec]:
    """One of two jobs waits for the only pair of nodes."""
    scheduler = Scheduler(Settings(nodes="named"), Fixed([MACHINES[0], MACHINES[8]]))
    spec = JobSpec(id="a", worst_rollout_s=100.0, worst_train_s=50.0, slo=1.0, iterations=400)
    scheduler.handle(0.0, ev.JobArrived(spec=spec))
    scheduler.handle(0.0, ev.JobArrived(spec=structs.replace(spec, id="b", team="t")))
    return scheduler, spec


def test_whoever_comes_goes_before_a_job_of_less_right() -> None:
    scheduler, spec = waiting_pair()
    alone = forecast(scheduler, 0.0)["b"]
    urgent = Arrivals(like=(structs.replace(spec, id="c", priority=9, team="t"),), every_s=10_000.0)
    said = forecast(scheduler, 0.0, arrivals=urgent)
    assert set(said) == {"b"}, "nobody asked for those who may come"
    assert said["b"] > alone + 40_000.0, "two and more have got past it"
    meek = Arrivals(like=(structs.replace(spec, id="c", team="t"),), every_s=10_000.0)
    assert forecast(scheduler, 0.0, arrivals=meek)["b"] == alone


def test_jobs_go_on_arriving_as_they_did_lately() -> None:
    scheduler, _ = waiting_pair()
    assert [spec.id for spec in lately(scheduler.cluster, 100.0).like] == ["a", "b"]
    assert lately(scheduler.cluster, 100.0).every_s == LATELY_S / 2.0
    assert lately(scheduler.cluster, LATELY_S + 1.0) == NOBODY
    come = Arrivals(lately(scheduler.cluster, 100.0).like, every_s=60.0)
    first, again = (list(islice(come.draw(500.0, np.random.default_rng(1)), 400)) for _ in range(2))
    assert first == again
    assert {spec.id.split()[0] for _, spec in first} == {"a", "b"}
    assert len({spec.id for _, spec in first}) == 400
    assert first[-1][0] - 500.0 == pytest.approx(400 * 60.0, rel=0.2)
    assert sum(1 for _ in come.draw(0.0, np.random.default_rng(1))) == pytest.approx(2880, rel=0.1)
    assert list(NOBODY.draw(0.0, np.random.default_rng(1))) == []


def test_who_is_like_a_job_that_no_longer_fits_is_not_refused_in_a_run_ahead() -> None:
    scheduler, spec = waiting_pair()
    huge = Arrivals(like=(structs.replace(spec, id="c", rollout_nodes=7),), every_s=1000.0)
    assert math.isfinite(forecast(scheduler, 0.0, arrivals=huge)["b"])


@pytest.mark.parametrize("why", ["no agent", "closed"])
def test_no_run_ahead_goes_on_for_a_job_that_open_nodes_cannot_take(why: str) -> None:
    scheduler, spec = waiting_pair()
    programs, gang = (True, False), 1
    if why == "closed":
        programs, gang = (False, False), 2
        scheduler.handle(0.0, ev.NodeJoined(machine=MACHINES[1]))
        scheduler.handle(0.0, ev.NodeClosed(node=MACHINES[1].name, status="cordoned"))
    last = structs.replace(spec, id="last", rollout_nodes=gang)
    scheduler.handle(0.0, ev.JobArrived(spec=last, programs=programs))
    drawn = Arrivals(like=(structs.replace(spec, id="c"),), every_s=10_000.0)
    ahead = _Ahead(scheduler, 0.0, 0, drawn)
    said = ahead.starts(None, EVENTS)
    assert said["last"] == math.inf
    assert ahead.now == said["b"], "it ends with the last one that can start"
