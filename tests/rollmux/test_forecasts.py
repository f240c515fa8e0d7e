"""When jobs that wait are expected to start: runs ahead, and the middle of them."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from cluster_worlds import run_on

from rollpacker.rollmux import decisions as do
from rollpacker.rollmux import events as ev
from rollpacker.rollmux.forecast import forecast, middle
from rollpacker.rollmux.inventory import Fixed, Machine
from rollpacker.rollmux.scheduler import Scheduler
from rollpacker.rollmux.settings import Settings
from rollpacker.rollmux.trace import Philly, philly

MACHINES = [
    Machine(name=f"{pool}{n}", pool=pool) for pool in ("rollout", "train") for n in range(8)
]

EARLY = 60
"""Phases."""


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
        before = json.dumps(self.state_dict())
        runs = [forecast(self, now, number=number)[job] for number in (0, 1, 1)]
        assert runs[1] == runs[2]
        assert json.dumps(self.state_dict()) == before
        return runs[:2]


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
    """Runs ahead once, when ``EARLY`` phases are over."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings, Fixed(MACHINES))
        self.said: dict[str, float] = {}
        self.was: dict[str, float] = {}
        self.began = math.inf
        self.left = EARLY

    def handle(self, now: float, event: ev.Event) -> list[do.Decision]:
        made = super().handle(now, event)
        self.left -= isinstance(event, ev.PhaseFinished)
        if self.left == 0 and not self.said:
            self.began = now
            self.said = forecast(self, now)
        for each in made:
            if isinstance(each, do.Place) and now >= self.began:
                self.was.setdefault(each.job, now - self.began)
        return made


@pytest.mark.parametrize("seed", range(3))
def test_where_nothing_is_left_to_chance_a_run_ahead_is_what_happens(seed: int) -> None:
    """Nobody arrives later, and every phase takes its worst case."""
    shape = Philly(jobs=20, days=0.01, nodes="mixed", mean_hours=1.0)
    drawn = philly(shape, np.random.default_rng(seed))
    jobs = [
        replace(
            job,
            rollout_s=np.full_like(job.rollout_s, job.spec.worst_rollout_s),
            train_s=np.full_like(job.train_s, job.spec.worst_train_s),
        )
        for job in drawn
    ]
    scheduler = Foreseeing(Settings(nodes="named", warm_s=0.0))
    run_on(jobs, scheduler)
    assert len(scheduler.was) > 5
    assert scheduler.said == pytest.approx(scheduler.was)


def test_the_middle_of_runs_is_told_and_who_may_never_start_is_left_out() -> None:
    never = math.inf
    runs = [{"a": 3.0, "b": never}, {"a": 9.0, "b": never, "c": 1.0}, {"a": 4.0, "b": 5.0}]
    assert middle(runs) == {"a": 4.0, "c": 1.0}
    assert middle(runs[:1]) == {"a": 3.0}
    assert middle([]) == {}
