"""When jobs that wait are expected to start: runs ahead, and the middle of them."""

import json
import math

import numpy as np
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


def test_promises_hold_on_few_nodes_and_forecasts_are_near() -> None:
    jobs = philly(
        Philly(jobs=24, days=0.25, nodes="mixed", mean_hours=2.0), np.random.default_rng(3)
    )
    said: dict[str, tuple[float, float]] = {}
    errors: list[float] = []
    apart: list[bool] = []

    class Forecasting(Scheduler):
        def handle(self, now: float, event: ev.Event) -> list[do.Decision]:
            made = super().handle(now, event)
            for each in made:
                if isinstance(each, do.Wait):
                    before = json.dumps(self.state_dict())
                    runs = [forecast(self, now, number=number) for number in range(3)]
                    said[each.job] = now, middle(runs)[each.job]
                    assert forecast(self, now, number=2) == runs[2]
                    apart.append(runs[1] != runs[2])
                    assert json.dumps(self.state_dict()) == before
                elif isinstance(each, do.Place) and each.job in said:
                    at, wait = said[each.job]
                    errors.append(abs(wait - (now - at)) / (now - at))
            return made

    named = Settings(margin=0.08, nodes="named")
    result, violations = run_on(jobs, Forecasting(named, Fixed(MACHINES)))
    assert violations == []
    assert result.to_json()["slo_attained"] == 1.0
    assert len(errors) > 5
    assert np.median(errors) < 0.5
    assert any(apart), "all runs ahead are the same"


def test_the_middle_of_runs_is_told_and_who_may_never_start_is_left_out() -> None:
    never = math.inf
    runs = [{"a": 3.0, "b": never}, {"a": 9.0, "b": never, "c": 1.0}, {"a": 4.0, "b": 5.0}]
    assert middle(runs) == {"a": 4.0, "c": 1.0}
    assert middle(runs[:1]) == {"a": 3.0}
    assert middle([]) == {}
