"""Permits as leases: one at a time, lost after their time, fenced, kept by a restart."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mux_world import TTL, World

from rollpacker.rollmux.model.settings import Settings
from rollpacker.rollmux.service.api import bodies
from rollpacker.rollmux.service.api.roles import Refused
from rollpacker.rollmux.service.commands import commands
from rollpacker.rollmux.service.state.clock import ClusterClock
from rollpacker.rollmux.service.store import StoreError, backup, restore


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.store.close()


def two_jobs(world: World) -> None:
    """Both on r0 and t0."""
    for name in ("a", "b"):
        assert world.submit(name)[0] == 201
    assert {node.name for node in world.core.leased.scheduler.cluster.nodes.values()} == {
        "r0",
        "t0",
    }


def test_a_job_runs_its_phases_in_order(world: World) -> None:
    world.submit("a", iterations=1)
    assert world.ask("a", "train")[1]["next"] == "rollout"
    assert world.run("a", "rollout")["next"] == "train"
    assert world.ask("a", "rollout")[1]["code"] == "order"
    assert world.run("a", "train") == {"job": "a", "phase": "train", "done": 1, "next": None}
    assert world.ask("a", "rollout")[1]["code"] == "complete"
    assert world.post(commands.end, "a") == (200, {"state": "ended"})
    assert world.ask("a", "rollout")[1]["code"] == "ended"
    assert world.post(commands.end, "a") == (200, {"state": "ended"})


def test_a_retry_gets_the_same_permit_and_no_more_time(world: World) -> None:
    world.submit("a")
    first = world.ask("a", "rollout", "k")[1]
    world.wait(4.0)
    status, again = world.ask("a", "rollout", "k")
    assert (status, again["token"], again["ttl_s"]) == (200, first["token"], TTL - 4.0)
    assert world.core.leased.seq == 2


def test_a_heartbeat_extends_once_for_each_key(world: World) -> None:
    world.submit("a")
    token = world.ask("a", "rollout")[1]["token"]
    world.wait(6.0)
    assert world.beat(token, "h")[1]["ttl_s"] == TTL
    world.wait(6.0)
    assert world.beat(token, "h")[1]["ttl_s"] == TTL - 6.0
    world.wait(4.5)
    assert world.beat(token)[1]["code"] == "lost"


def test_a_lost_lease_goes_to_the_next_job(world: World) -> None:
    two_jobs(world)
    mine = world.ask("a", "rollout", "ka")[1]
    assert world.ask("b", "rollout", "kb")[0] == 0
    world.wait(TTL - 0.001)
    assert world.ask("b", "rollout", "kb")[0] == 0
    world.wait(0.002)
    status, theirs = world.ask("b", "rollout", "kb")
    assert (status, theirs["nodes"]) == (200, ["r0"])
    assert theirs["token"] > mine["token"]
    assert world.finish(mine["token"])[0] == 409
    assert world.ask("a", "rollout", "ka")[1]["code"] == "over"
    assert world.ask("a", "rollout")[0] == 0


@pytest.mark.parametrize("down_s", [0.0, 1.0, 1000.0])
def test_a_restart_gives_the_full_time_again(world: World, down_s: float) -> None:
    two_jobs(world)
    mine = world.ask("a", "rollout", "ka")[1]
    world.ask("b", "rollout", "kb")
    world.wait(9.0)
    world.restart(down_s)
    assert world.ask("a", "rollout", "ka")[1] == mine | {"ttl_s": TTL}
    assert world.ask("b", "rollout", "kb")[0] == 0
    world.wait(TTL - 0.01)
    assert world.ask("b", "rollout", "kb")[0] == 0
    assert world.finish(mine["token"])[0] == 200
    assert world.ask("b", "rollout", "kb")[0] == 200


def test_a_second_process_of_a_job_waits_for_the_lease_of_the_first(world: World) -> None:
    world.submit("a")
    token = world.ask("a", "rollout", "old")[1]["token"]
    status, held = world.ask("a", "rollout", "new")
    assert (status, held["code"], held["token"]) == (409, "held", token)
    world.wait(TTL)
    assert world.ask("a", "rollout", "new")[0] == 200
    assert world.ask("a", "rollout", "old")[1]["code"] == "superseded"


def test_the_newest_request_of_a_job_wins(world: World) -> None:
    two_jobs(world)
    token = world.ask("a", "rollout")[1]["token"]
    assert world.ask("b", "rollout", "old")[0] == 0
    assert world.ask("b", "rollout", "new")[0] == 0
    assert world.ask("b", "rollout", "old")[1]["code"] == "superseded"
    world.finish(token)
    assert world.ask("b", "rollout", "new")[0] == 200


def test_an_abandoned_phase_is_asked_for_again(world: World) -> None:
    world.submit("a")
    token = world.ask("a", "rollout")[1]["token"]
    assert world.post(commands.abandon, token) == (200, {"job": "a", "next": "rollout"})
    assert world.post(commands.abandon, token)[0] == 409
    assert world.ask("a", "rollout")[1]["token"] > token


def test_an_end_waits_for_the_permit_that_is_out(world: World) -> None:
    two_jobs(world)
    token = world.ask("a", "rollout")[1]["token"]
    world.ask("b", "rollout", "kb")
    assert world.post(commands.end, "a") == (202, {"state": "ending"})
    assert world.beat(token)[1]["code"] == "lost"
    world.restart()
    assert world.core.leased.state("a") == "ending"
    assert world.ask("b", "rollout", "kb")[0] == 0
    world.wait(TTL)
    assert world.core.leased.state("a") == "ended"
    assert world.ask("b", "rollout", "kb")[0] == 200


def test_an_end_goes_through_once_its_holder_stops(world: World) -> None:
    two_jobs(world)
    token = world.ask("a", "rollout")[1]["token"]
    world.ask("b", "rollout", "kb")
    world.post(commands.end, "a")
    assert world.finish(token)[1]["code"] == "lost"
    assert world.core.leased.state("a") == "ended"
    assert world.ask("b", "rollout", "kb")[0] == 200


def test_a_failed_node_is_fenced_before_its_jobs_move(world: World) -> None:
    two_jobs(world)
    token = world.ask("a", "rollout")[1]["token"]
    status, told = world.post(commands.node_failed, "t0")
    assert (status, told["state"], sorted(told["jobs"])) == (200, "failing", ["a", "b"])
    assert world.beat(token)[1]["code"] == "lost"
    assert world.ask("b", "rollout", "kb")[0] == 0
    assert world.post(commands.node_failed, "t0")[0] == 202
    world.restart()
    assert world.core.leased.state("a") == "failing"
    world.wait(TTL)
    assert world.core.leased.state("a") == "moving"
    status, told = world.ask("a", "rollout")
    assert status == 200
    move = told["move"]
    assert move["reason"] == "failure"
    assert world.post(commands.moved, "a", {"move": move["id"] + 1})[0] == 409
    assert world.post(commands.moved, "a", {"move": move["id"]})[0] == 200
    assert world.run("a", "rollout")["next"] == "train"
    assert world.post(commands.node_heartbeat, "t0")[0] == 410
    assert world.post(commands.node_failed, "t0") == (200, {"state": "failed", "jobs": []})


def test_a_failed_node_is_never_used_again(world: World) -> None:
    two_jobs(world)
    world.post(commands.node_failed, "t0")
    for job in ("a", "b"):
        assert "t0" not in world.ask(job, "rollout")[1]["move"]["train"]


def test_a_permit_on_a_failing_node_is_withheld(world: World) -> None:
    two_jobs(world)
    world.run("a", "rollout")
    token = world.ask("a", "train")[1]["token"]
    world.post(commands.node_failed, "r0")
    status, _ = world.ask("b", "rollout", "kb")
    assert status == 0
    assert world.core.leased.jobs["b"].token is not None
    world.restart()
    assert world.ask("b", "rollout", "kb")[0] == 0
    assert world.post(commands.abandon, token)[0] == 409
    world.wait(TTL)
    assert world.core.leased.state("b") == "moving"
    assert world.core.leased.leases == {}
    assert world.ask("b", "rollout", "kb")[1]["move"]["reason"] == "failure"


def test_a_silent_agent_is_a_failed_node(world: World) -> None:
    world.submit("a")
    assert world.post(commands.node_heartbeat, "r0") == (200, {"ttl_s": TTL})
    world.wait(TTL - 1)
    world.restart()
    world.wait(TTL - 1)
    assert world.core.leased.state("a") == "idle"
    assert world.post(commands.node_heartbeat, "r0")[0] == 200
    world.wait(TTL + 1)
    assert world.core.leased.state("a") == "moving"
    assert world.post(commands.node_heartbeat, "nowhere")[0] == 404


def test_a_key_belongs_to_one_request(world: World) -> None:
    world.submit("a")
    token = world.ask("a", "rollout")[1]["token"]
    first = world.finish(token, 5.0, "k")
    assert first[0] == 200
    assert world.finish(token, 5.0, "k") == first
    assert world.finish(token, 6.0, "k")[0] == 422
    world.restart()
    assert world.finish(token, 5.0, "k") == first
    assert world.core.leased.scheduler.cluster.jobs["a"].rollout_s == 5.0


def test_draining_turns_new_jobs_away(world: World) -> None:
    world.submit("a")
    assert world.post(commands.drain, None, {}) == (200, {"draining": True, "jobs": 1})
    assert world.submit("b")[1]["code"] == "draining"
    assert world.run("a", "rollout")["next"] == "train"
    world.restart()
    assert world.submit("b")[0] == 409
    world.post(commands.drain, None, {"draining": False})
    assert world.submit("b")[0] == 201


BAD_SPECS: list[tuple[dict[str, Any], str]] = [
    ({"slo": 0.5}, "slo"),
    ({"worst_rollout_s": "1"}, "worst_rollout_s"),
    ({"worst_train_s": -1.0}, "worst_train_s"),
    ({"rollout_nodes": 10**6}, "rollout_nodes"),
    ({"rollout_nodes": 1.5}, "rollout_nodes"),
    ({"iterations": 10**30}, "iterations"),
    ({"train_memory_gb": 1e9}, "train_memory_gb"),
    ({"rollout_memory_gb": -1.0}, "rollout_memory_gb"),
    ({"id": "../etc"}, "id"),
    ({"id": ""}, "id"),
    ({"wishes": 3}, "wishes"),
]


@pytest.mark.parametrize(("change", "field"), BAD_SPECS)
def test_a_bad_job_is_refused_with_its_field(
    world: World, change: dict[str, Any], field: str
) -> None:
    status, told = world.post(
        commands.submit, None, {"id": "a", "worst_rollout_s": 1.0, "worst_train_s": 1.0} | change
    )
    assert status == 400
    assert field in told["error"]
    assert world.core.leased.seq == 0


@pytest.mark.parametrize("seconds", [0, -1, 1e10, "5", None, True, 10**400])
def test_seconds_that_make_no_sense_are_refused(world: World, seconds: Any) -> None:
    world.submit("a")
    token = world.ask("a", "rollout")[1]["token"]
    status, told = world.post(commands.finish, token, {"seconds": seconds})
    assert status == 400
    assert told["error"].startswith("seconds:")


def test_a_wall_clock_that_jumps_changes_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.submit("a")
    token = world.ask("a", "rollout")[1]["token"]
    real = time.time
    for jump in (1e9, -1e9):
        monkeypatch.setattr(time, "time", lambda jump=jump: real() + jump)
        world.wait(1.0)
        assert world.beat(token)[1]["ttl_s"] == TTL
        before = world.core.now()
        world.restart(2.0)
        assert world.core.now() == pytest.approx(before + 2.0)
        assert world.beat(token)[0] == 200
    assert world.finish(token)[0] == 200


def test_the_clock_goes_on_after_a_reboot() -> None:
    saved = {"clock_boot": "one", "clock_offset": "-100.0"}
    same = ClusterClock(saved, 50.0, lambda: 170.0, "one")
    assert same.now() == 70.0
    other = ClusterClock(saved, 50.0, lambda: 3.0, "two")
    assert other.now() == 50.0
    unknown = ClusterClock({"clock_boot": "", "clock_offset": "-1.0"}, 50.0, lambda: 3.0, "")
    assert unknown.now() == 50.0


def test_other_settings_are_refused(world: World) -> None:
    world.submit("a")
    world.settings = Settings(tails=False)
    with pytest.raises(StoreError, match="made with other scheduler settings"):
        world.restart()
    world.settings = None  # type: ignore[assignment]
    world.store.close()
    world.open()
    assert world.core.settings.cold_s == 1.0


def test_a_database_of_another_format_does_not_start(world: World) -> None:
    world.store._db.execute("UPDATE meta SET value = '9' WHERE name = 'format'")
    with pytest.raises(StoreError, match="has format '9'"):
        world.restart()


@pytest.mark.parametrize("down_s", [0.0, 3 * TTL])
def test_agents_that_fall_silent_together_are_one_failure(world: World, down_s: float) -> None:
    """The first failure moves the job: the other node is given back before it is looked at."""
    world.submit("a")
    for node in ("r0", "t0"):
        assert world.post(commands.node_heartbeat, node)[0] == 200
    if down_s:
        world.restart(down_s)
    world.wait(TTL + 1.0)
    assert world.core.leased.agents == {}
    assert "move" in world.ask("a", "rollout")[1]
    assert set(world.core.leased.scheduler.cluster.nodes).isdisjoint({"r0", "t0"})


def test_while_draining_a_live_job_may_come_again_and_a_new_one_may_not(world: World) -> None:
    world.submit("a")
    world.post(commands.drain, None, {"draining": True})
    assert world.submit("a")[1]["code"] == "exists"
    assert world.submit("b")[1]["code"] == "draining"


def test_numbers_of_permits_do_not_repeat_after_a_backup_was_put_back(tmp_path: Path) -> None:
    """They began again, so two jobs held one node and each kept the other's permit alive."""
    world = World(tmp_path)
    world.submit("a")
    backup(tmp_path / "mux.sqlite", tmp_path / "copy")
    mine = world.ask("a", "rollout")[1]["token"]
    world.store.close()
    restore(tmp_path / "copy", tmp_path / "mux.sqlite")
    world.open()
    world.submit("b", slo=1.0)
    assert world.ask("b", "rollout", "kb") == (0, {}), "the nodes of a may be the same ones"
    assert world.beat(mine)[0] in (404, 409)
    world.wait(TTL - 1.0)
    assert world.ask("b", "rollout", "kb") == (0, {})
    world.restart()
    assert world.core.next_deadline() == TTL
    world.wait(TTL + 0.5)
    status, permit = world.ask("b", "rollout", "kb")
    assert (status, permit["ttl_s"]) == (200, TTL - 0.5)
    assert permit["token"] > mine
    world.restart()
    assert not world.core.quiet
    world.store.close()


def test_a_copy_that_was_put_back_by_hand_is_noticed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(tmp_path)
    world.submit("a")
    backup(tmp_path / "mux.sqlite", tmp_path / "copy")
    world.ask("a", "rollout")
    world.store.close()
    (tmp_path / "copy").rename(tmp_path / "mux.sqlite")
    world.open()
    assert "(1 answered entries), so no permit is granted for 10 s" in caplog.text
    assert world.ask("a", "rollout") == (0, {})
    world.store.close()


@pytest.mark.parametrize("act", [commands.finish, commands.abandon])
def test_a_permit_is_of_the_job_that_names_itself(world: World, act: Any) -> None:
    world.submit("a")
    token = world.ask("a", "rollout")[1]["token"]
    body = {"seconds": 1.0} if act is commands.finish else {}
    asked = bodies.Post("beat", "", token=token, of="b")
    with pytest.raises(Refused, match="belongs to another job, not to b"):
        commands.heartbeat(world.core, asked, token)
    assert world.post(act, token, body | {"job": "b"})[1].get("code") == "lost"
    assert world.post(act, token, body | {"job": "a"})[0] == 200
