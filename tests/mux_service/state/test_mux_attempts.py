"""Programs that end while their jobs move, or on nodes that are not in use any more."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mux_world import SHARED, TTL, World

from rollpacker.core.codec import dumps_finite
from rollpacker.rollmux.model.inventory import Machine
from rollpacker.rollmux.model.program import JobProgram
from rollpacker.rollmux.service.client.client import SAFE_SHARE
from rollpacker.rollmux.service.commands import commands
from rollpacker.rollmux.service.serve import ServeOptions
from rollpacker.rollmux.service.state import daemon_events
from rollpacker.rollmux.service.state.attempts import MOST_NODES_LOST, ProgramRuns, RunningPrograms
from rollpacker.rollmux.service.views import views

MACHINES = [
    Machine(name=f"{pool}-{number}", pool=pool)
    for pool in ("rollout", "train")
    for number in (0, 1)
]
PROGRAM = {"command": ["train"], "restarts": 0}


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path, replace(SHARED, nodes="named"), MACHINES)
    made.agents_everywhere()
    yield made
    made.store.close()


def told(world: World, node: str, *seen: dict[str, Any]) -> list[dict[str, Any]]:
    status, answer = world.post(commands.node_heartbeat, node, {"attempts": list(seen)})
    assert status == 200, answer
    return answer["attempts"]


def started(world: World) -> str:
    """A job whose program runs; on which node."""
    assert world.submit("a", program=PROGRAM)[0] == 201
    node = world.core.leased.lead("a")
    assert node is not None
    assert [each["stop"] for each in told(world, node)] == [False]
    return node


def drained(world: World, node: str) -> None:
    body = {"status": "draining"}
    assert world.post(commands.node_closed, node, body)[0] == 200
    move = world.core.leased.jobs["a"].move
    assert move is not None
    assert world.post(commands.moved, "a", {"move": move.id})[0] == 200


def test_a_program_that_was_asked_to_end_has_not_failed_though_its_job_is_back(
    world: World,
) -> None:
    here = started(world)
    drained(world, here)
    assert [each["stop"] for each in told(world, here)] == [True]
    assert world.post(commands.node_opened, here)[0] == 200
    drained(world, world.core.leased.lead("a"))
    assert world.core.leased.lead("a") == here
    seen = {"job": "a", "number": 1, "code": 143, "stopped": True}
    assert [each["number"] for each in told(world, here, seen)] == [2]
    assert world.core.leased.jobs["a"].ended is None


def test_a_dead_agents_job_goes_elsewhere_as_soon_as_the_page_says(world: World) -> None:
    """Until it is frozen its program asks for more time, so its permit outlives its agent."""
    here = started(world)
    token = world.ask("a", "rollout")[1]["token"]
    world.wait(SAFE_SHARE * TTL)
    assert world.beat(token)[0] == 200
    world.wait(TTL - 0.001)
    assert (world.core.leased.state("a"), here in world.core.leased.failed) == ("failing", False)
    world.wait(0.001)
    assert (world.core.leased.state("a"), here in world.core.leased.failed) == ("moving", True)
    page = (Path(__file__).parents[3] / "docs" / "mux_operate.md").read_text(encoding="utf-8")
    leases, ttl = 1 + SAFE_SHARE, ServeOptions(state=Path()).ttl
    assert f"after up to {leases:g} ({leases * ttl:g} s) where only the agent is gone" in page


def test_a_node_is_not_removed_before_its_programs_have_ended(world: World) -> None:
    here = started(world)
    drained(world, here)
    status, answer = world.post(commands.node_removed, here)
    assert (status, answer["code"]) == (409, "used")
    assert answer["error"] == f"node {here}: the program of job a is about to end there"
    told(world, here, {"job": "a", "number": 1, "code": 143})
    assert world.post(commands.node_removed, here)[0] == 200


def test_the_end_of_a_program_is_heard_from_a_rented_node_that_was_given_back(
    tmp_path: Path,
) -> None:
    world = World(tmp_path)
    here = started(world)
    assert world.post(commands.end, "a")[0] == 200
    assert here not in world.core.leased.scheduler.cluster.nodes
    assert [each["stop"] for each in told(world, here, {"job": "a", "number": 1})] == [True]
    world.restart()
    assert told(world, here, {"job": "a", "number": 1, "code": 143}) == []
    assert world.core.leased.jobs["a"].program.running is None
    assert world.post(commands.node_heartbeat, here)[0] == 404
    world.store.close()


def test_a_rented_node_that_falls_silent_with_a_program_has_failed(tmp_path: Path) -> None:
    world = World(tmp_path)
    started(world)
    assert world.post(commands.end, "a")[0] == 200
    world.wait(TTL + 1.0)
    assert world.core.leased.jobs["a"].program.running is None
    world.restart()
    assert world.core.leased.jobs["a"].program.running is None
    world.store.close()


GANG = {"command": ["drive", "{rank}"], "members": ["follow", "{rank}"], "restarts": 1}


@pytest.fixture
def gang(tmp_path: Path) -> Iterator[World]:
    """Three nodes of each kind, and a job that needs two of each; its driver is begun."""
    third = [Machine(name=f"{pool}-2", pool=pool) for pool in ("rollout", "train")]
    world = World(tmp_path, replace(SHARED, nodes="named"), [*MACHINES, *third])
    world.agents_everywhere()
    assert world.submit("a", rollout_nodes=2, train_nodes=2, program=GANG)[0] == 201
    for node in world.core.leased.gang("a")[1:]:
        assert told(world, node) == []
    told(world, world.core.leased.gang("a")[0])
    yield world
    world.store.close()


def ended(number: int, code: int, *, stopped: bool = False) -> dict[str, Any]:
    return {"job": "a", "number": number, "code": code, "stopped": stopped}


def stops(world: World, nodes: tuple[str, ...]) -> list[bool]:
    return [each["stop"] for node in nodes for each in told(world, node)]


def test_a_gang_has_a_process_on_each_of_its_nodes(gang: World) -> None:
    nodes = gang.core.leased.gang("a")
    assert [node.partition("-")[0] for node in nodes] == ["rollout"] * 2 + ["train"] * 2
    for rank, node in enumerate(nodes):
        (each,) = told(gang, node)
        assert (each["rank"], each["nodes"]) == (rank, list(nodes))
        assert each["program"]["command"][0] == ("follow" if rank else "drive")
    gang.restart()
    assert stops(gang, nodes) == [False] * 4


def test_one_that_fails_ends_the_attempt_which_has_failed(gang: World) -> None:
    nodes = gang.core.leased.gang("a")
    told(gang, nodes[2], ended(1, 0))
    assert stops(gang, nodes) == [False] * 4
    told(gang, nodes[2], ended(1, 1))
    assert stops(gang, nodes) == [True, False, False, False]
    (again,) = told(gang, nodes[0], ended(1, 143, stopped=True)) or [None]
    assert again is None  # it waits a moment
    assert [told(gang, node) for node in nodes[1:]] == [[], [], []]
    gang.wait(2.0)
    (again,) = told(gang, nodes[0])
    assert again["number"] == 2
    assert gang.core.leased.jobs["a"].program.used == 1
    told(gang, nodes[1], ended(1, 137))  # of the one before
    assert stops(gang, nodes) == [False] * 4


def test_where_one_of_its_nodes_fails_its_driver_is_asked_to_end(gang: World) -> None:
    nodes = gang.core.leased.gang("a")
    assert gang.post(commands.node_failed, nodes[3])[0] == 200
    assert gang.core.leased.programs.on(nodes[3]) == []
    assert stops(gang, nodes[:3]) == [True, False, False]
    gang.restart()
    assert gang.core.leased.programs.on(nodes[3]) == []
    told(gang, nodes[0], ended(1, 143, stopped=True))
    new = gang.core.leased.gang("a")
    assert nodes[3] not in new
    (again,) = told(gang, new[0])
    assert (again["number"], again["nodes"]) == (2, list(new))
    assert gang.core.leased.jobs["a"].program.used == 0


def test_nodes_on_which_nothing_runs_any_more_are_forgotten() -> None:
    """A cloud's come under ever new names, and each look walked all of them."""
    programs = RunningPrograms()
    for number in range(3):
        programs.add("a", [f"r{number}"])
        programs.add("b", [f"r{number}"])
        programs.discard("a", [f"r{number}"])
        assert programs.on(f"r{number}") == ["b"]
        programs.discard("b", [f"r{number}", "never"])
    assert programs._on == {}
    assert programs.jobs == set()


def test_a_program_that_cannot_be_told_costs_no_other_of_its_node(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor does a job that cannot be shown hide the others."""
    wanted, shown = commands._wanted, views._job
    for name in "ab":
        # Both on one node, as jobs that share nodes are.
        assert world.submit(name, program=PROGRAM, rollout_memory_gb=1.0)[0] == 201
    node = world.core.leased.lead("a")
    assert node == world.core.leased.lead("b")
    assert [each["job"] for each in told(world, node)] == ["a", "b"]

    def odd(core: Any, record: Any, node: str) -> Any:
        """As of a text from before, half a character that no program can have."""
        found = wanted(core, record, node)
        return found | ({"rank": object()} if record.spec.id == "a" else {})

    def failing(core: Any, name: str, *more: Any) -> Any:
        if name == "a":
            raise KeyError("injected")
        return shown(core, name, *more)

    monkeypatch.setattr(commands, "_wanted", odd)
    monkeypatch.setattr(views, "_job", failing)
    assert [each["job"] for each in told(world, node)] == ["b"]
    assert [each["id"] for each in views.status(world.core)["jobs"]] == ["b"]
    assert "job a: its program" in caplog.text
    assert "job a cannot be shown" in caplog.text


def test_texts_from_before_are_told_as_they_are(world: World) -> None:
    """A daemon of before has taken half of a surrogate pair into a program's environment; each
    heartbeat of its node was answered by 500."""
    world.submit("a")
    odd = JobProgram(command=("train",), environment={"A": "\ud800"})
    world.core.record(daemon_events.ProgramGiven(job="a", program=odd))
    world.core.commit()
    world.restart()
    node = world.core.leased.lead("a")
    assert node is not None
    (wanted,) = told(world, node)
    assert json.loads(dumps_finite(wanted)) == wanted
    assert wanted["program"]["environment"] == {"A": "\ud800"}


def test_a_job_that_breaks_its_nodes_one_after_the_other_ends(tmp_path: Path) -> None:
    many = [Machine(name=f"rollout-{number}", pool="rollout") for number in range(2, 6)]
    world = World(tmp_path, replace(SHARED, nodes="named"), [*MACHINES, *many])
    world.agents_everywhere()
    assert world.submit("a", program=PROGRAM | {"restarts": 9})[0] == 201
    for _ in range(MOST_NODES_LOST):
        node = world.core.leased.lead("a")
        assert node is not None
        assert [each["job"] for each in told(world, node)] == ["a"]
        assert world.post(commands.node_failed, node)[0] == 200
    node = world.core.leased.lead("a")
    assert node is not None
    assert told(world, node) == []
    found = views.job(world.core, "a")
    assert (found["state"], found["outcome"]) == ("ended", "failed")
    assert found["program"] is not None
    assert found["program"]["nodes_lost"] == MOST_NODES_LOST
    world.store.close()


def test_restarts_are_counted_anew_when_the_job_gets_on() -> None:
    program = ProgramRuns(JobProgram(command=("train",), restarts=1))
    found = list[tuple[int, str]]()
    for number, done in enumerate((0, 3, 5, 5), start=1):
        program.begin(number, "rollout-0", (), 0.0)
        program.end(1, 1.0, done, told=False)
        found.append((program.used, program.outcome))
    assert found == [(1, ""), (1, ""), (1, ""), (2, "failed")]


def test_the_pause_before_a_restart_doubles_up_to_a_minute() -> None:
    program = ProgramRuns(JobProgram(command=("train",), restarts=9))
    assert program.ready_at() == 0.0
    pauses = list[float | None]()
    for number in range(1, 9):
        program.begin(number, "rollout-0", (), 0.0)
        program.end(1, 100.0, 0, told=False)
        pauses.append(program.ready_at())
    assert pauses == [101.0, 102.0, 104.0, 108.0, 116.0, 132.0, 160.0, 160.0]


def test_the_program_of_a_held_job_ends_when_its_iteration_is_over_and_goes_on_when_it_is_released(
    world: World,
) -> None:
    here = started(world)
    status, permit = world.ask("a", "rollout")
    assert status == 200
    assert world.post(commands.change, "a", {"held": True}) == (
        200,
        {"state": "running", "held": True, "priority": 0},
    )
    assert [each["stop"] for each in told(world, here)] == [False]
    assert world.finish(permit["token"])[0] == 200
    world.run("a", "train")
    world.restart()
    shown = views.job(world.core, "a")
    assert (shown["state"], shown["done"], shown["queue"], shown["held"]) == ("held", 1, None, True)
    assert views.status(world.core)["counts"] == {"held": 1}
    (wanted,) = told(world, here)
    assert wanted["stop"]
    assert told(world, here, {"job": "a", "number": 1, "code": 143, "stopped": True}) == []
    world.wait(TTL / 2)
    assert world.post(commands.change, "a", {"held": False})[1]["state"] == "moving"
    started_again = [told(world, node) for node in ("rollout-0", "rollout-1")]
    assert [each["number"] for found in started_again for each in found] == [2]
    record = world.core.leased.jobs["a"]
    assert record.program is not None
    assert (record.program.used, record.program.outcome) == (0, "")
    assert world.post(commands.end, "a")[0] == 200
    assert world.post(commands.change, "a", {"held": True})[1]["code"] == "ended"


def test_no_program_comes_to_a_node_whose_agent_starts_none_any_more(world: World) -> None:
    for node in ("rollout-0", "rollout-1"):
        assert world.post(commands.node_heartbeat, node, {})[0] == 200
    assert world.submit("a", program=PROGRAM)[1]["state"] == "queued"
    assert "no agent that starts programs" in views.job(world.core, "a")["queue"]["reason"]
    told(world, "rollout-1")
    assert world.core.leased.lead("a") == "rollout-1"
