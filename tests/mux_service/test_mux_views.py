"""What people are shown: promises, phases, nodes."""

from pathlib import Path

import pytest
from mux_world import World

from rollpacker.rollmux.service import node_commands, views


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
    world.post(node_commands.node_heartbeat, node)
    world.wait(4.0)
    shown = views.node(world.core, node)
    assert (shown["reported_s"], shown["memory_gb"], shown["total_gb"]) == (
        4.0,
        {"a": 150.0},
        1536.0,
    )
    world.store.close()
