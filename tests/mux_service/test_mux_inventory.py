"""A daemon with named nodes: jobs wait for them, agents report them, owners close them."""

import json
import math
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from mux_world import SHARED, TTL, World

from rollpacker.core.codec import load, loads
from rollpacker.rollmux.arrivals import lately
from rollpacker.rollmux.check import check_lines
from rollpacker.rollmux.forecast import forecast
from rollpacker.rollmux.inventory import Machine
from rollpacker.rollmux.scheduler import Scheduler
from rollpacker.rollmux.service import commands, lookout, node_commands, views
from rollpacker.rollmux.service.ahead import Ahead, asked
from rollpacker.rollmux.service.history import event_log
from rollpacker.rollmux.settings import Settings, Team
from rollpacker.rollmux.snapshot import Snapshot

ONE_EACH = [Machine(name="roll-0", pool="rollout"), Machine(name="train-0", pool="train")]
NAMED = replace(SHARED, nodes="named", teams=(Team(name="math", rollout=1, train=1),))


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path, NAMED, ONE_EACH)
    yield made
    made.core.close()


def violations(world: World) -> list[str]:
    lines = "".join(event_log(world.store.reader(), world.settings)).splitlines()
    return [f"{each.rule}: {each.what}" for each in check_lines(lines)]


def alone(world: World, name: str, **more: object) -> dict[str, object]:
    """Submit a job that may not be slowed down."""
    status, told = world.submit(name, slo=1.0, iterations=4, **more)
    assert status == 201, told
    return told


def test_a_job_waits_with_its_place_reason_and_forecast_and_starts_in_its_turn(
    world: World,
) -> None:
    assert alone(world, "a")["state"] == "idle"
    assert alone(world, "b")["state"] == "queued"
    assert alone(world, "c")["state"] == "queued"
    # It may ask already: its request waits.
    assert world.ask("b", "rollout", "key-b") == (0, {})
    while (queue := views.job(world.core, "c")["queue"])["starts_in_s"] is None:
        time.sleep(0.01)
    assert (queue["position"], queue["of"]) == (2, 2)
    assert queue["reason"] == (
        "no group can take it, and it needs 1 rollout node (0 free) and "
        "1 train node (0 free) of its own"
    )
    # Two jobs go first, of four iterations of twenty seconds at worst and 16 usually.
    assert 120.0 < queue["starts_in_s"] < 180.0
    for _ in range(4):
        world.run("a", "rollout", takes=5.0)
        world.run("a", "train", takes=5.0)
    world.restart()
    assert world.post(commands.end, "a")[0] == 200
    status, permit = world.ask("b", "rollout", "key-b")
    assert (status, permit["nodes"]) == (200, ["roll-0"])
    assert views.job(world.core, "c")["queue"]["position"] == 1
    assert views.job(world.core, "b")["queue"] is None
    assert violations(world) == []


def test_waiting_does_not_count_but_by_option(world: World) -> None:
    alone(world, "a")
    alone(world, "b")
    alone(world, "c", slo_since="submission")
    world.wait(100.0)
    shown = {job["id"]: job for job in views.status(world.core)["jobs"]}
    assert shown["b"]["uncounted_s"] == pytest.approx(100.0)
    assert shown["b"]["slo_state"] != "missed"
    assert shown["c"]["uncounted_s"] == 0.0
    assert shown["c"]["slo_state"] == "missed"


def test_what_never_fits_is_refused_and_not_recorded(world: World) -> None:
    status, told = world.submit("big", rollout_nodes=500)
    assert (status, told["code"]) == (409, "too_large")
    assert told["error"] == "job big: wants 500 rollout nodes, and there are 1"
    assert "big" not in world.core.brain.jobs
    assert world.submit("big", rollout_nodes=500, too_large="wait")[0] == 201
    assert alone(world, "small")["state"] == "idle"


def test_agents_register_nodes_and_what_is_less_than_listed_is_set_aside(world: World) -> None:
    status, told = world.post(
        node_commands.register, None, {"name": "roll-1", "pool": "rollout", "devices": 4}
    )
    assert (status, told["status"]) == (200, "open")
    less = {"name": "roll-0", "pool": "rollout", "memory_gb": 512.0}
    status, told = world.post(node_commands.register, None, less)
    assert told["status"] == "set_aside"
    shown = views.node(world.core, "roll-0")
    assert shown["why"] == "its agent reports 512 GB of memory, not 1536"
    assert shown["agent"]
    alone(world, "a")
    assert views.job(world.core, "a")["rollout_nodes"] == ["roll-1"]
    assert world.post(node_commands.register, None, {"name": "x y", "pool": "rollout"})[0] == 400


def test_a_silent_agent_is_a_failure_and_its_job_waits_for_another_node(world: World) -> None:
    assert world.post(node_commands.node_heartbeat, "roll-0") == (200, {"ttl_s": TTL})
    alone(world, "a")
    status, permit = world.ask("a", "rollout")
    assert status == 200
    world.wait(TTL + 1.0)
    world.wait(TTL + 1.0)
    assert views.node(world.core, "roll-0")["state"] == "failed"
    assert views.job(world.core, "a")["state"] == "queued"
    assert world.beat(permit["token"])[0] == 409
    assert world.post(node_commands.node_heartbeat, "roll-0")[0] == 410
    # It comes back as it was listed.
    world.post(node_commands.register, None, {"name": "roll-0", "pool": "rollout"})
    status, told = world.ask("a", "rollout")
    assert told["move"]["reason"] == "failure"
    assert violations(world) == []


def test_drain_uncordon_and_remove(world: World) -> None:
    world.post(node_commands.register, None, {"name": "roll-1", "pool": "rollout"})
    alone(world, "a")
    node = views.job(world.core, "a")["rollout_nodes"][0]
    body = {"status": "draining", "reason": "new cables"}
    status, told = world.post(node_commands.node_closed, node, body)
    assert (status, told["status"], told["jobs"]) == (200, "draining", ["a"])
    assert world.post(node_commands.node_removed, node)[1]["code"] == "used"
    world.run("a", "rollout", takes=5.0)
    world.restart()
    assert node not in views.job(world.core, "a")["rollout_nodes"]
    assert world.post(node_commands.node_opened, node)[1]["status"] == "open"
    assert world.post(node_commands.node_removed, node)[0] == 200
    assert world.post(node_commands.node_removed, node)[0] == 404
    assert violations(world) == []


def test_teams_and_their_nodes_are_shown(world: World) -> None:
    alone(world, "a", team="math")
    assert views.status(world.core)["teams"] == [
        {
            "name": "math",
            "guaranteed": {"rollout": 1.0, "train": 1.0},
            "used": {"rollout": 1.0, "train": 1.0},
            "borrowed": {"rollout": 0.0, "train": 0.0},
            "share": 1.0,
            "jobs": {"placed": 1, "waiting": 0},
            "owed": False,
            "priority": None,
        }
    ]
    alone(world, "b", priority=3)
    alone(world, "c", team="math", priority=-1)
    math, none = views.status(world.core)["teams"]
    assert (math["jobs"], math["owed"], math["priority"]) == (
        {"placed": 1, "waiting": 1},
        False,
        -1,
    )
    assert (none["name"], none["jobs"]) == ("", {"placed": 0, "waiting": 1})
    assert none["guaranteed"] == {"rollout": 0.0, "train": 0.0}


def test_what_a_team_has_beyond_its_guarantee_is_borrowed(world: World) -> None:
    world.post(node_commands.register, None, {"name": "roll-1", "pool": "rollout"})
    world.post(node_commands.register, None, {"name": "train-1", "pool": "train"})
    alone(world, "a", team="math")
    alone(world, "b", team="math")
    (math,) = views.status(world.core)["teams"]
    assert (math["used"]["rollout"], math["borrowed"]["rollout"], math["share"]) == (2.0, 1.0, 2.0)


def test_reclaimed_nodes_go_to_the_team_and_the_guest_waits_without_losing_its_promise(
    world: World,
) -> None:
    status, _ = world.submit("guest", slo=1.5, iterations=100)
    assert status == 201
    world.run("guest", "rollout", takes=5.0)
    assert alone(world, "owner", team="math")["state"] == "queued"
    world.run("guest", "train", takes=5.0)
    assert views.job(world.core, "guest")["state"] == "queued"
    assert views.job(world.core, "owner")["rollout_nodes"] == ["roll-0"]
    before = views.job(world.core, "guest")["slo_slack_s"]
    world.wait(500.0)
    assert views.job(world.core, "guest")["slo_slack_s"] == pytest.approx(before)
    assert world.ask("guest", "rollout", "again") == (0, {})
    assert world.post(commands.end, "owner")[0] == 200
    status, told = world.ask("guest", "rollout", "again")
    assert told["move"]["reason"] == "resume"
    assert violations(world) == []


def test_a_cloud_has_no_named_nodes(tmp_path: Path) -> None:
    world = World(tmp_path, Settings())
    status, told = world.post(node_commands.register, None, {"name": "a", "pool": "rollout"})
    assert (status, told["code"]) == (409, "cloud")
    assert json.loads(json.dumps(views.status(world.core)))["named"] is False
    world.store.close()


def told_of(world: World, job: str) -> Any:
    """What is told of a job's start as soon as a run ahead that is due is over."""
    views.job(world.core, job)
    if (running := world.core._lookout._running) is not None:
        while running.found is None:
            time.sleep(0.01)
    return views.job(world.core, job)["queue"]["starts_in_s"]


def test_nobody_waits_for_a_forecast(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is there later, and by then as much time has passed."""
    alone(world, "a")
    alone(world, "b")
    found = Event()
    look = Ahead.run

    def slow(self: Ahead, request: bytes) -> dict[str, float]:
        assert found.wait(60.0)
        return look(self, request)

    monkeypatch.setattr(Ahead, "run", slow)
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
    ahead = world.core._lookout._ahead
    assert ahead is not None
    ahead.close()
    for _ in range(2):
        world.wait(100.0)
        told_of(world, "b")
    assert told_of(world, "b") is not None
    assert world.core._lookout._ahead not in (None, ahead)


def test_a_process_says_what_the_scheduler_itself_does(world: World) -> None:
    for name in "abcd":
        alone(world, name)
    scheduler, now = world.core.brain.scheduler, world.core.now()
    ahead = Ahead(world.core.settings)
    for number in range(2):
        mine = forecast(scheduler, now, number=number, arrivals=lately(scheduler.cluster, now))
        assert ahead.run(asked(scheduler, now, number)) == mine
    ahead.close()


class Foreseen:
    """Runs ahead that find this for job ``b``, one after the other."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *waits: float) -> None:
        self._waits = list(waits)
        self.numbers: list[int] = []
        self.coming: list[str] = []
        monkeypatch.setattr(Ahead, "run", lambda _, request: self._found(*loads(request)))

    def _found(self, now: float, number: int, state: dict[str, Any]) -> dict[str, float]:
        scheduler = Scheduler(NAMED)
        scheduler.restore(load(state, Snapshot))
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
    assert world.post(node_commands.node_closed, "roll-0", closed)[0] == 200
    world.wait(6.0)
    assert told_of(world, "b") is None, "whatever was told before"
    queue = views.job(world.core, "b")["queue"]
    assert "needs 1 rollout node (0 free, 1 closed)" in queue["reason"]
    assert world.post(node_commands.node_opened, "roll-0")[0] == 200
    world.wait(6.0)
    assert told_of(world, "b") == pytest.approx(488.0, abs=5.0), "as it was before"
    assert runs.numbers == [0, 1]


def test_who_has_just_come_is_looked_for_sooner(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookout, "_FRESH_S", 0.0)
    monkeypatch.setattr(lookout, "_SHARE", 1e12)
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
