"""Forecasts of jobs that wait, as whoever looks at a daemon is told of them."""

import math
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from mux_world import World
from test_mux_inventory import NAMED, ONE_EACH, alone

from rollpacker.core.codec import load, loads
from rollpacker.rollmux.scheduler.scheduler import Scheduler
from rollpacker.rollmux.scheduler.snapshot import SchedulerSnapshot
from rollpacker.rollmux.service.commands import commands
from rollpacker.rollmux.service.state import forecast_process, forecaster
from rollpacker.rollmux.service.state.forecast_process import ForecastProcess, asked
from rollpacker.rollmux.service.views import views
from rollpacker.rollmux.simulation.arrivals import lately
from rollpacker.rollmux.simulation.forecast import forecast


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path, NAMED, ONE_EACH)
    yield made
    made.core.close()


def told_of(world: World, job: str) -> Any:
    """What is told of a job's start as soon as a run ahead that is due is over."""
    views.job(world.core, job)
    if (running := world.core._forecaster._running) is not None:
        while running.found is None:
            time.sleep(0.01)
    return views.job(world.core, job)["queue"]["starts_in_s"]


def test_nobody_waits_for_a_forecast(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is there later, and by then as much time has passed."""
    alone(world, "a")
    alone(world, "b")
    found = Event()
    look = ForecastProcess.run

    def slow(self: ForecastProcess, request: bytes) -> dict[str, float]:
        assert found.wait(60.0)
        return look(self, request)

    monkeypatch.setattr(ForecastProcess, "run", slow)
    assert views.job(world.core, "b")["queue"]["starts_in_s"] is None
    world.wait(10.0)
    assert views.job(world.core, "b")["queue"]["starts_in_s"] is None
    found.set()
    expected = told_of(world, "b")
    assert 40.0 < expected < 80.0
    world.wait(5.0)
    assert told_of(world, "b") == pytest.approx(expected - 5.0)


def test_a_process_that_has_ended_is_followed_by_another(world: World) -> None:
    alone(world, "a")
    alone(world, "b")
    assert told_of(world, "b") is not None
    first = world.core._forecaster._ahead
    assert first is not None
    first.close()
    for _ in range(2):
        world.wait(100.0)
        told_of(world, "b")
    assert told_of(world, "b") is not None
    assert world.core._forecaster._ahead not in (None, first)


def test_without_a_process_there_is_no_forecast_and_all_else(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[float] = []

    def full(*_: object) -> None:
        tried.append(world.time)
        raise OSError("too many processes")

    with monkeypatch.context() as none:
        none.setattr(forecast_process, "start_child", full)
        alone(world, "a")
        alone(world, "b")
        for _ in range(3):
            assert told_of(world, "b") is None
        assert len(tried) == 1
        world.wait(6.0)
    assert told_of(world, "b") is not None


def test_a_process_says_what_the_scheduler_itself_does(world: World) -> None:
    for name in "abcd":
        alone(world, name)
    scheduler, now = world.core.leased.scheduler, world.core.now()
    process = ForecastProcess(world.core.settings)
    for number in range(2):
        mine = forecast(scheduler, now, number=number, arrivals=lately(scheduler.cluster, now))
        assert process.run(asked(scheduler, now, number)) == mine
    process.close()


class Foreseen:
    """Runs ahead that find this for job ``b``, one after the other."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *waits: float) -> None:
        self._waits = list(waits)
        self.numbers: list[int] = []
        self.coming: list[str] = []
        monkeypatch.setattr(ForecastProcess, "run", lambda _, request: self._found(*loads(request)))

    def _found(self, now: float, number: int, state: dict[str, Any]) -> dict[str, float]:
        scheduler = Scheduler(NAMED)
        scheduler.restore(load(state, SchedulerSnapshot))
        self.coming = [spec.id for spec in lately(scheduler.cluster, now).like]
        self.numbers.append(number)
        return {"b": self._waits[min(len(self.numbers), len(self._waits)) - 1]}


def test_what_is_told_is_the_middle_of_the_last_runs_ahead(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = Foreseen(monkeypatch, 500.0, 900.0, 300.0, math.inf)
    alone(world, "a")
    alone(world, "b")
    told: list[float | None] = []
    for _ in range(4):
        told.append(told_of(world, "b"))
        world.wait(100.0)
    assert runs.numbers == [0, 1, 2, 3]
    assert told == pytest.approx([500.0, 400.0, 300.0, 200.0], abs=5.0)
    assert runs.coming == ["a", "b"], "those of late are expected again"


def test_a_range_is_told_of_enough_runs(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    Foreseen(monkeypatch, 500.0, 900.0, 300.0, 650.0, math.inf)
    alone(world, "a")
    alone(world, "b")
    told: list[object] = []
    for _ in range(5):
        told_of(world, "b")
        told.append(views.job(world.core, "b")["queue"]["starts_between_s"])
        world.wait(100.0)
    assert told[:2] == [None, None]
    assert told[2] == pytest.approx((300.0, 800.0), abs=5.0)
    assert told[3] == pytest.approx((200.0, 700.0), abs=5.0)
    # The third said 300 when 200 had passed: it has a say until then.
    assert told[4] == (pytest.approx(100.0, abs=5.0), None)


def test_runs_that_were_wrong_or_are_old_have_no_say(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    Foreseen(monkeypatch, *[150.0] * 5, 5000.0)
    alone(world, "a")
    alone(world, "b")
    for _ in range(5):
        assert told_of(world, "b") is not None
        world.wait(200.0)
    assert told_of(world, "b") == pytest.approx(5000.0, abs=5.0), "the others said: by now"
    world.wait(20_000.0)
    assert told_of(world, "b") == pytest.approx(5000.0, abs=5.0)


def test_runs_from_before_a_node_was_closed_have_no_say(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = Foreseen(monkeypatch, 500.0, math.inf)
    alone(world, "a")
    alone(world, "b")
    assert told_of(world, "b") == pytest.approx(500.0, abs=5.0)
    closed = {"status": "cordoned", "reason": "slow link"}
    assert world.post(commands.node_closed, "roll-0", closed)[0] == 200
    world.wait(6.0)
    assert told_of(world, "b") is None, "whatever was told before"
    queue = views.job(world.core, "b")["queue"]
    assert "needs 1 rollout node (0 free, 1 closed)" in queue["reason"]
    assert world.post(commands.node_opened, "roll-0")[0] == 200
    world.wait(6.0)
    assert told_of(world, "b") == pytest.approx(488.0, abs=5.0), "as it was before"
    assert runs.numbers == [0, 1]
    # A job that waits for an agent may start where one was heard.
    world.agents_everywhere()
    world.wait(6.0)
    told_of(world, "b")
    assert runs.numbers == [0, 1, 2]


def test_who_has_just_come_is_looked_for_sooner(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forecaster, "_FRESH_S", 0.0)
    monkeypatch.setattr(forecaster, "_SHARE", 1e12)
    runs = Foreseen(monkeypatch, 500.0)
    alone(world, "a")
    alone(world, "b")
    for _ in range(3):
        assert told_of(world, "b") is not None
        world.wait(10.0)
    assert runs.numbers == [0]
    alone(world, "c")
    told_of(world, "b")
    assert runs.numbers == [0, 1]
