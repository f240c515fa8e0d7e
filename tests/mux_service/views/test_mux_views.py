"""What people are shown: promises, phases, nodes."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from mux_world import World

from rollpacker.rollmux.service.commands import commands
from rollpacker.rollmux.service.state.records import JobRecord
from rollpacker.rollmux.service.state.transaction_log import TransactionLog
from rollpacker.rollmux.service.views import views
from rollpacker.rollmux.service.views.metrics import numbers


@pytest.mark.parametrize(
    "length", [{}, {"iterations": 1000}, {"expected_iterations": 1000}], ids=str
)
def test_a_job_that_lost_its_time_to_a_restart_is_not_shown_as_kept(
    tmp_path: Path, length: dict[str, int]
) -> None:
    world = World(tmp_path)
    world.submit("a", slo=1.5, **length)
    for phase in ("rollout", "train"):
        world.run("a", phase)
        world.wait(5.0)
    assert views.job(world.core, "a")["slo_state"] == "kept"
    world.restart(600.0)
    found = views.job(world.core, "a")
    assert found["slowdown"] > 1.5
    assert found["slo_state"] == ("behind" if length else "missed")
    world.store.close()


def test_a_job_that_has_just_started_has_missed_nothing(tmp_path: Path) -> None:
    """It was "-50 s missed", in red."""
    world = World(tmp_path)
    world.submit("a", slo=1.0)
    world.wait(50.0)
    found = views.job(world.core, "a")
    assert (found["slo_slack_s"], found["slo_state"]) == (-50.0, "behind")
    world.post(commands.end, "a")
    assert views.job(world.core, "a")["slo_state"] == "behind"
    world.submit("b", slo=1.0, iterations=2)
    world.wait(50.0)
    assert views.job(world.core, "b")["slo_state"] == "missed", "it has no more to come"
    world.store.close()


def test_what_the_running_iteration_has_done_is_no_loss(tmp_path: Path) -> None:
    """It counted as still to come, too, so whoever worked alone lost slack all the time."""
    world = World(tmp_path)
    world.submit("a", slo=1.5)
    found: list[tuple[float, float | None]] = []

    def look() -> None:
        told = views.job(world.core, "a")
        found.append((told["slo_slack_s"], told["slowdown"]))

    look()
    for phase in ("rollout", "train", "rollout"):
        token = world.ask("a", phase)[1]["token"]
        for _ in range(2):
            world.time += 5.0
            world.beat(token)
            look()
        assert world.finish(token, 10.0)[0] == 200
        look()
    # The first iteration banks slack for the ones to come.
    assert [slack for slack, _ in found] == [10.0] * 6 + [20.0] * 4
    assert {slowdown for _, slowdown in found} == {None, 1.0}
    world.store.close()


@pytest.mark.parametrize(
    ("length", "runs", "code", "outcome"),
    [
        ({}, 1, None, "ended"),
        ({"iterations": 1}, 1, None, "done"),
        ({"iterations": 2}, 1, None, "ended"),
        ({}, 0, 0, "done"),
        ({}, 0, 3, "failed"),
        ({}, 0, None, "stopped"),
    ],
)
def test_how_a_job_has_ended(
    tmp_path: Path, length: dict[str, int], runs: int, code: int | None, outcome: str
) -> None:
    world = World(tmp_path)
    program = {"command": ["a"], "restarts": 0} if not runs else None
    world.submit("a", program=program, **length)
    assert views.job(world.core, "a")["outcome"] == ""
    for phase in ("rollout", "train") * runs:
        world.run("a", phase, takes=5.0)
    if program is not None:
        node = views.job(world.core, "a")["rollout_nodes"][0]
        world.post(commands.node_heartbeat, node, {"attempts": []})
        seen = {"job": "a", "number": 1, "code": code}
        if code is not None:
            world.post(commands.node_heartbeat, node, {"attempts": [seen]})
    world.post(commands.end, "a")
    assert views.job(world.core, "a")["outcome"] == outcome
    world.store.close()


def test_phases_of_one_job_or_one_node(tmp_path: Path) -> None:
    world = World(tmp_path)
    for name in ("a", "b"):
        world.submit(name, slo=1.0)
        world.run(name, "rollout", takes=5.0)
    token = world.ask("a", "train")[1]["token"]
    phases = views.timeline(world.core, 60.0)["phases"]
    assert [(each["job"], each["outcome"]) for each in phases] == [
        ("a", "done"), ("b", "done"), ("a", "running"),
    ]  # fmt: skip
    of_a = views.timeline(world.core, 60.0, job="a")["phases"]
    assert [each["token"] for each in of_a] == [phases[0]["token"], token]
    (node,) = phases[1]["nodes"]
    assert views.timeline(world.core, 60.0, node=node)["phases"] == [phases[1]]
    assert views.timeline(world.core, 0.0, job="b", node="none")["phases"] == []
    world.store.close()


def test_when_an_agent_reported_and_how_much_memory_there_is(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.submit("a")
    node = views.job(world.core, "a")["rollout_nodes"][0]
    assert views.node(world.core, node)["reported_s"] is None
    world.post(commands.node_heartbeat, node)
    world.wait(4.0)
    shown = views.node(world.core, node)
    assert (shown["reported_s"], shown["memory_gb"], shown["total_gb"]) == (
        4.0,
        {"a": 150.0},
        1536.0,
    )
    world.store.close()


class Unwalked(dict[str, JobRecord]):
    """Jobs that can be looked up one by one only."""

    def __iter__(self) -> Iterator[str]:
        raise AssertionError("somebody walks all jobs that there ever were")

    items = values = keys = __iter__  # type: ignore[assignment]


def test_a_look_is_at_live_jobs_and_the_last_that_ended(tmp_path: Path) -> None:
    """Each walked all jobs that there ever were, while heartbeats waited."""
    world = World(tmp_path)
    for name in ("live", *(f"old{number}" for number in range(4))):
        assert world.submit(name, team="math" if name == "old1" else "")[0] == 201
        if name != "live":
            world.time += 1.0
            assert world.post(commands.end, name)[0] == 200
    for way in ("live", "restarted"):
        if way != "live":
            world.restart()
        world.core.leased.jobs = Unwalked(world.core.leased.jobs)
        status = views.status(world.core, ended=2)
        assert [job["id"] for job in status["jobs"]] == ["live"]
        assert [job["id"] for job in status["ended"]] == ["old2", "old3"]
        assert status["counts"] == {"idle": 1, "ended": 4}
        assert status["cost_per_h"]["solo"] > 0.0
        states = numbers(world.core)["states"]
        assert states == {("idle", "other"): 1, ("ended", "other"): 4}
        assert world.post(commands.drain, None, {"draining": way == "live"})[1]["jobs"] == 1
    # Their names are taken for ever.
    assert world.submit("old0")[1]["code"] == "exists"
    world.store.close()


def test_a_job_that_ended_while_its_program_goes_on_is_among_the_ended(tmp_path: Path) -> None:
    world = World(tmp_path)
    program = {"command": ["a"], "members": [], "stop_s": 1.0, "restarts": 0, "folder": ""}
    world.submit("a", program=program)
    node = views.job(world.core, "a")["rollout_nodes"][0]
    world.post(commands.node_heartbeat, node, {"attempts": []})
    world.post(commands.end, "a")
    world.submit("b")
    world.post(commands.end, "b")
    status = views.status(world.core)
    assert [job["id"] for job in status["ended"]] == ["a", "b"]
    assert status["counts"] == {"ended": 2}
    assert world.core.leased.ended == ["b"]
    world.store.close()


def test_all_jobs_are_read_a_few_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(views, "_AT_ONCE", 2)
    world = World(tmp_path)
    looks: list[int] = []
    for number in range(5):
        world.submit(f"j{number}")

    async def read(look: Callable[[TransactionLog], Any]) -> Any:
        found = look(world.core)
        looks.append(len(found) if isinstance(found, list) else 0)
        return found

    found = asyncio.run(views.all_jobs(read))
    assert [job["id"] for job in found["jobs"]] == [f"j{number}" for number in range(5)]
    assert max(looks) == 2
    shown = views._job

    def failing(core: TransactionLog, name: str, *more: Any) -> Any:
        if name in ("j0", "j2", "j3"):
            raise KeyError("injected")
        return shown(core, name, *more)

    # Those that cannot be told of hide no other, and bring none twice.
    monkeypatch.setattr(views, "_job", failing)
    found = asyncio.run(views.all_jobs(read))
    assert [job["id"] for job in found["jobs"]] == ["j1", "j4"]
    world.store.close()
