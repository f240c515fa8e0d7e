"""A daemon with named nodes: jobs wait for them, agents report them, owners close them."""

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from event_check import check_lines
from mux_world import SHARED, TTL, World

from rollpacker.rollmux.model.inventory import Machine
from rollpacker.rollmux.model.settings import Settings, Team
from rollpacker.rollmux.scheduler.inventory_file import InventoryFile
from rollpacker.rollmux.service.commands import commands
from rollpacker.rollmux.service.store import StoreError
from rollpacker.rollmux.service.views import views
from rollpacker.rollmux.service.views.history import event_log

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
        "no group can take it (one of them might miss its SLO), and it needs "
        "1 rollout node (0 free) and 1 train node (0 free) of its own"
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


def test_a_job_that_memory_keeps_out_is_told_so(world: World) -> None:
    (total,) = {node["total_gb"] for node in views.status(world.core)["nodes"]}
    world.submit("a", train_memory_gb=total - 10)
    world.submit("b", train_memory_gb=20)
    queue = views.job(world.core, "b")["queue"]
    assert "(20 GB of a train node's memory, at most 10 GB are left)" in queue["reason"]
    world.post(commands.node_closed, "train-0", {"status": "draining", "reason": ""})
    queue = views.job(world.core, "b")["queue"]
    assert "(no train node in use is open to it)" in queue["reason"]


def test_nodes_that_a_job_would_not_have_to_share_are_not_in_its_way(tmp_path: Path) -> None:
    nodes = [Machine(name=f"roll-{n}", pool="rollout", memory_gb=100.0) for n in range(2)]
    world = World(tmp_path, NAMED, [*nodes, Machine(name="train-0", pool="train")])
    alone(world, "a", rollout_memory_gb=90.0)
    alone(world, "b", rollout_memory_gb=20.0)
    assert "(one of them might miss its SLO" in views.job(world.core, "b")["queue"]["reason"]
    world.core.close()


def test_all_nodes_of_a_gang_need_memory(tmp_path: Path) -> None:
    nodes = [
        Machine(name=f"{pool}-{n}", pool=pool, memory_gb=100.0)
        for pool in ("rollout", "train")
        for n in range(2)
    ]
    world = World(tmp_path, NAMED, nodes)
    small = {"rollout_memory_gb": 10.0}
    world.submit("a", train_memory_gb=90.0, **small)
    world.submit("b", train_memory_gb=50.0, **small)
    gang = {"rollout_nodes": 2, "train_nodes": 2, **small}
    world.submit("c", train_memory_gb=20.0, **gang)
    reason = views.job(world.core, "c")["queue"]["reason"]
    assert "(20 GB of a train node's memory, at most 10 GB are left on 2 of them)" in reason
    world.post(commands.node_closed, "train-1", {"status": "cordoned", "reason": ""})
    reason = views.job(world.core, "c")["queue"]["reason"]
    assert "(only 1 train node in use is open to it)" in reason
    world.core.close()


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
    assert told["error"] == "job big: needs 500 rollout nodes, but there are 1"
    assert "big" not in world.core.leased.jobs
    assert world.submit("big", rollout_nodes=500, too_large="wait")[0] == 201
    assert alone(world, "small")["state"] == "idle"


def test_agents_register_nodes_and_what_is_less_than_listed_is_set_aside(world: World) -> None:
    status, told = world.post(
        commands.register, None, {"name": "roll-1", "pool": "rollout", "devices": 4}
    )
    assert (status, told["status"]) == (200, "open")
    less = {"name": "roll-0", "pool": "rollout", "memory_gb": 512.0}
    status, told = world.post(commands.register, None, less)
    assert told["status"] == "set_aside"
    shown = views.node(world.core, "roll-0")
    assert shown["why"] == "its agent reports 512 GB of memory, not 1536"
    assert shown["agent"]
    alone(world, "a")
    assert views.job(world.core, "a")["rollout_nodes"] == ["roll-1"]
    assert world.post(commands.register, None, {"name": "x y", "pool": "rollout"})[0] == 400


def test_a_silent_agent_is_a_failure_and_its_job_waits_for_another_node(world: World) -> None:
    assert world.post(commands.node_heartbeat, "roll-0") == (200, {"ttl_s": TTL})
    alone(world, "a")
    status, permit = world.ask("a", "rollout")
    assert status == 200
    world.wait(TTL + 1.0)
    world.wait(TTL + 1.0)
    assert views.node(world.core, "roll-0")["state"] == "failed"
    assert views.job(world.core, "a")["state"] == "queued"
    assert world.beat(permit["token"])[0] == 409
    assert world.post(commands.node_heartbeat, "roll-0")[0] == 410
    # It comes back as it was listed.
    world.post(commands.register, None, {"name": "roll-0", "pool": "rollout"})
    status, told = world.ask("a", "rollout")
    assert told["move"]["reason"] == "failure"
    assert violations(world) == []


@pytest.mark.parametrize("permit", [False, True])
def test_a_node_says_why_it_is_down_and_since_when(world: World, permit: bool) -> None:
    assert views.node(world.core, "roll-0")["status_s"] is None
    world.post(commands.node_heartbeat, "roll-0")
    alone(world, "a")
    if permit:
        assert world.ask("a", "rollout")[0] == 200
    world.post(commands.node_failed, "roll-0", {"reason": "nvidia-smi ended with 9"})
    world.restart()
    world.wait(TTL + 1.0)
    world.wait(5.0)
    shown = views.node(world.core, "roll-0")
    assert (shown["status"], shown["why"]) == ("down", "nvidia-smi ended with 9")
    assert shown["status_s"] == pytest.approx(5.0 if permit else TTL + 6.0)
    world.post(commands.register, None, {"name": "roll-0", "pool": "rollout"})
    world.wait(2.0)
    shown = views.node(world.core, "roll-0")
    assert (shown["status"], shown["why"], shown["status_s"]) == ("open", "", 2.0)
    world.wait(TTL)
    assert views.node(world.core, "roll-0")["why"] == "its agent was silent for 10 s"
    world.post(commands.node_failed, "train-0", {})
    assert views.node(world.core, "train-0")["why"] == "operator reported its failure"


def test_drain_uncordon_and_remove(world: World) -> None:
    world.post(commands.register, None, {"name": "roll-1", "pool": "rollout"})
    alone(world, "a")
    node = views.job(world.core, "a")["rollout_nodes"][0]
    body = {"status": "draining", "reason": "new cables"}
    status, told = world.post(commands.node_closed, node, body)
    assert (status, told["status"], told["jobs"]) == (200, "draining", ["a"])
    assert world.post(commands.node_removed, node)[1]["code"] == "used"
    world.run("a", "rollout", takes=5.0)
    world.restart()
    assert node not in views.job(world.core, "a")["rollout_nodes"]
    assert views.node(world.core, node).get("status") == "drained"
    assert world.post(commands.node_opened, node)[1]["status"] == "open"
    assert world.post(commands.node_removed, node)[0] == 200
    assert world.post(commands.node_removed, node)[0] == 404
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
    world.post(commands.register, None, {"name": "roll-1", "pool": "rollout"})
    world.post(commands.register, None, {"name": "train-1", "pool": "train"})
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


def beats(world: World, node: str, agent: str) -> tuple[int, str]:
    body = {"agent": agent} if agent else {}
    status, told = world.post(commands.node_heartbeat, node, body)
    return status, told.get("code", "")


@pytest.mark.parametrize("way", ["live", "restarted"])
def test_one_agent_at_a_time_reports_a_node(
    world: World, caplog: pytest.LogCaptureFixture, way: str
) -> None:
    """Both started every program, at once and silently."""
    node = {"name": "roll-0", "pool": "rollout", "agent": "a" * 32}
    assert world.post(commands.register, None, node)[0] == 200
    if way != "live":
        world.restart()
    second = world.post(commands.register, None, node | {"agent": "b" * 32})
    assert (second[0], second[1]["code"]) == (409, "taken")
    assert second[1]["error"].startswith("node roll-0: another agent reported it 0.0 s ago")
    for agent in ("b" * 32, ""):
        assert beats(world, "roll-0", agent) == (409, "taken")
    assert caplog.text.count("roll-0: another agent reported it") == 3
    # The one before, started again, goes on at once.
    assert beats(world, "roll-0", "a" * 32) == (200, "")
    assert world.post(commands.register, None, node)[0] == 200
    # When it is silent the node has failed, and another one may bring it back.
    world.wait(TTL + 1.0)
    assert beats(world, "roll-0", "b" * 32) == (410, "failed")
    assert world.post(commands.register, None, node | {"agent": "b" * 32})[0] == 200
    assert beats(world, "roll-0", "a" * 32) == (409, "taken")
    assert beats(world, "roll-0", "b" * 32) == (200, "")


def test_an_agent_of_before_is_followed_by_one_that_says_who_it_is(world: World) -> None:
    assert beats(world, "roll-0", "") == (200, "")
    assert beats(world, "roll-0", "") == (200, "")
    assert beats(world, "roll-0", "a" * 32) == (200, "")
    assert beats(world, "roll-0", "") == (409, "taken")


def test_a_cloud_has_no_named_nodes(tmp_path: Path) -> None:
    world = World(tmp_path, Settings())
    status, told = world.post(commands.register, None, {"name": "a", "pool": "rollout"})
    assert (status, told["code"]) == (409, "cloud")
    assert json.loads(json.dumps(views.status(world.core)))["named"] is False
    world.store.close()


def test_what_differs_from_the_stored_settings_is_named(tmp_path: Path) -> None:
    made = InventoryFile(teams=(Team(name="math", rollout=1, train=1), Team(name="code")))
    settings = made.settings(SHARED)
    for folder in (tmp_path, turned := tmp_path / "turned"):
        folder.mkdir(exist_ok=True)
        World(folder, settings).store.close()
    teams = (Team(name="math", rollout=2, train=1), Team(name="vision"))
    with pytest.raises(StoreError) as refused:
        World(tmp_path, replace(settings, teams=teams, tails=False))
    math = 'team math is {"rollout":1.0,"train":1.0} there, {"rollout":2,"train":1} here'
    code = 'team code is {"rollout":0.0,"train":0.0} there, not here'
    vision = 'team vision is not there, {"rollout":0.0,"train":0.0} here'
    said = f"settings: tails is true there, false here; {math}; {code}; {vision}. Start without"
    assert said in str(refused.value)
    with pytest.raises(StoreError, match=r"teams have another order\. Start without"):
        World(turned, replace(settings, teams=settings.teams[::-1]))
