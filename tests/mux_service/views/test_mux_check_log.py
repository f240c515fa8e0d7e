"""What the checker says of the event logs that a daemon writes."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from event_check import check_lines
from mux_world import SHARED, TTL, World

from rollpacker.rollmux.model.inventory import Machine
from rollpacker.rollmux.service.commands import commands
from rollpacker.rollmux.service.views.history import event_log


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.store.close()


def log(world: World) -> list[dict[str, Any]]:
    text = "".join(event_log(world.store.reader(), world.settings))
    return [json.loads(line) for line in text.splitlines()]


def found(world: World) -> list[str]:
    return [f"{each.rule}: {each.what}" for each in check_lines(map(json.dumps, log(world)))]


def phase(world: World, job: str, name: str, seconds: float = 5.0) -> None:
    status, permit = world.ask(job, name)
    assert status == 200, permit
    world.time += seconds
    assert world.finish(permit["token"], seconds)[0] == 200


def iterate(world: World, job: str, count: int = 1) -> None:
    for _ in range(count):
        phase(world, job, "rollout")
        phase(world, job, "train")


def end(world: World, job: str) -> None:
    assert world.post(commands.end, job)[0] == 200


def test_a_job_of_unknown_length_departs_when_it_likes(world: World) -> None:
    world.submit("a")
    iterate(world, "a", 2)
    end(world, "a")
    assert found(world) == []


def test_a_job_of_known_length_must_reach_it(world: World) -> None:
    world.submit("a", iterations=2)
    iterate(world, "a", 2)
    end(world, "a")
    assert found(world) == []
    lines = log(world)
    lines[0]["jobs"][0]["iterations"] = 3
    assert [each.rule for each in check_lines(map(json.dumps, lines))] == ["iterations"]


@pytest.mark.parametrize("lost", ["abandoned", "ran out"])
@pytest.mark.parametrize("name", ["rollout", "train"])
def test_a_lost_phase_is_not_done(world: World, lost: str, name: str) -> None:
    """The very first phase included: no seconds of the job are known then."""
    world.submit("a")
    if name == "train":
        phase(world, "a", "rollout")
    token = world.ask("a", name)[1]["token"]
    if lost == "abandoned":
        assert world.post(commands.abandon, token)[0] == 200
    else:
        world.wait(TTL)
    if name == "train":
        phase(world, "a", "train")
    iterate(world, "a", 2)
    end(world, "a")
    assert found(world) == []
    assert any(line.get("lost") for line in log(world))


@pytest.mark.parametrize("when", ["at once", "waiting to train", "with a permit", "between"])
@pytest.mark.parametrize("iterations", [None, 5])
def test_a_job_may_be_cancelled(world: World, when: str, iterations: int | None) -> None:
    world.submit("a", iterations=iterations)
    if when != "at once":
        iterate(world, "a")
    if when == "waiting to train":
        phase(world, "a", "rollout")
    status = 200
    if when == "with a permit":
        world.ask("a", "rollout")
        status = 202
    assert world.post(commands.end, "a")[0] == status
    world.wait(TTL)
    assert log(world)[-1]["kind"] in ("depart", "rebase")
    assert found(world) == []


def test_a_live_cluster_has_lost_no_job(world: World) -> None:
    for name in ("a", "b", "c"):
        world.submit(name)
    iterate(world, "a")
    world.ask("b", "rollout")
    end(world, "c")
    assert found(world) == []
    lines = [line for line in log(world) if line["kind"] != "depart"]
    rules = {each.rule for each in check_lines(map(json.dumps, lines))}
    assert rules == {"lost_job", "leaked_node"}


def test_a_rollout_that_a_failure_made_void_may_be_shorter_than_the_next(world: World) -> None:
    world.submit("a")
    iterate(world, "a")
    phase(world, "a", "rollout", 3.0)
    assert world.post(commands.node_failed, "t0", {"reason": "fire"})[0] == 200
    status, move = world.ask("a", "rollout")
    assert status == 200
    assert world.post(commands.moved, "a", {"move": move["move"]["id"]})[0] == 200
    phase(world, "a", "rollout", 8.0)
    phase(world, "a", "train")
    end(world, "a")
    assert found(world) == []


def test_a_phase_that_claims_more_than_its_time_is_found(world: World) -> None:
    world.submit("a")
    token = world.ask("a", "rollout")[1]["token"]
    world.time += 1.0
    assert world.finish(token, 7.0)[0] == 200
    assert [each.split(":")[0] for each in found(world)] == ["too_fast"]


def test_a_job_may_be_ended_while_it_waits_for_its_first_nodes(tmp_path: Path) -> None:
    named = World(tmp_path, replace(SHARED, nodes="named"))
    named.submit("a", too_large="wait")
    end(named, "a")
    assert found(named) == []
    named.store.close()


def test_a_failed_node_takes_the_memory_of_its_jobs_on_other_nodes_along(tmp_path: Path) -> None:
    """The next job is put on those before the log says that the stranded one waits."""
    nodes = [("rollout", "a"), ("rollout", "b"), ("train", "c")]
    machines = [Machine(name=name, pool=pool, memory_gb=300.0) for pool, name in nodes]
    named = World(tmp_path, replace(SHARED, nodes="named"), machines)
    for job, gang in (("wide", 2), ("narrow", 1)):
        named.submit(job, slo=1.0, rollout_nodes=gang, slo_since="submission")
    named.post(commands.node_failed, "a")
    made = [each for each in log(named) if each["kind"] in ("place", "wait", "node_down")][-3:]
    assert [(each["kind"], each["job"]) for each in made] == [
        ("node_down", None),
        ("place", "narrow"),
        ("wait", "wide"),
    ]
    assert found(named) == []
    named.store.close()
