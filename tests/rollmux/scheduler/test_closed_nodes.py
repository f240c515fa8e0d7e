"""Nodes that are closed while jobs are about to come, or while they are down."""

import pytest
from test_waiting_jobs import arrive, placed, scheduler, spec

from rollpacker.rollmux.model import decisions as do
from rollpacker.rollmux.model import events as ev
from rollpacker.rollmux.placement.placement import Site
from rollpacker.rollmux.scheduler.scheduler import Scheduler


def machine(on: Scheduler, name: str) -> ev.NodeJoined:
    (found,) = (each for each in on.cluster.inventory.machines if each.name == name)
    return ev.NodeJoined(machine=found)


@pytest.mark.parametrize("status", ["cordoned", "draining"])
def test_a_node_that_was_closed_is_closed_when_it_is_back(status: str) -> None:
    """Whoever drains a node to restart it does not want jobs on it after the restart."""
    on = scheduler(1, 1)
    on.handle(0.0, ev.NodeClosed(node="rollout0", status=status, why="new cables"))
    on.handle(1.0, ev.NodeFailed(node="rollout0"))
    on.handle(2.0, machine(on, "rollout0"))
    assert arrive(on, 3.0, spec("one")) == [do.Wait(job="one")]
    assert placed(on.handle(4.0, ev.NodeOpened(node="rollout0"))) == ["one"]


def test_a_node_can_be_closed_while_it_is_down() -> None:
    on = scheduler(1, 1)
    on.handle(0.0, ev.NodeFailed(node="rollout0"))
    on.handle(1.0, ev.NodeClosed(node="rollout0", status="cordoned"))
    on.handle(2.0, machine(on, "rollout0"))
    assert arrive(on, 3.0, spec("one")) == [do.Wait(job="one")]


def reserved(on: Scheduler, name: str, group: int | None, nodes: tuple[str, ...] = ()) -> None:
    """A place for later, as repacking takes it for a job that is inside an iteration."""
    pools = tuple(tuple(n for n in nodes if n.startswith(pool)) for pool in ("rollout", "train"))
    fresh = (0, 0) if nodes else (1, 1)
    site = Site(group=group, nodes=pools, fresh=fresh, price=0.0)
    on._reservations.reserve(on.cluster.jobs[name], site)


def test_nobody_sets_out_for_a_node_that_was_closed_meanwhile() -> None:
    on = scheduler(2, 2)
    arrive(on, 0.0, spec("one", iterations=100))
    job = on.cluster.jobs["one"]
    made = on.handle(1.0, ev.PermitRequested(job="one", phase="rollout"))
    assert isinstance(made[0], do.Permit)
    reserved(on, "one", None)
    (node,) = job.destination.nodes[0]
    made = on.handle(2.0, ev.NodeClosed(node=node, status="cordoned"))
    assert job.destination is None
    assert node not in on.cluster.nodes


def test_the_number_of_a_group_that_had_jobs_is_not_used_again() -> None:
    on = scheduler(2, 2)
    arrive(on, 0.0, spec("one"), spec("two"))
    home = on.cluster.jobs["two"].home
    on.handle(1.0, ev.PermitRequested(job="one", phase="rollout"))
    reserved(on, "one", home.group, home.names)
    on.handle(2.0, ev.JobEnded(job="two"))
    on.handle(3.0, ev.NodeClosed(node=home.nodes[0][0], status="cordoned"))
    on.handle(4.0, ev.NodeOpened(node=home.nodes[0][0]))
    arrive(on, 5.0, spec("three"))
    assert on.cluster.jobs["three"].home.group > home.group


@pytest.mark.parametrize("iterations", [1, 2])
def test_one_that_has_only_to_say_that_it_is_over_is_not_moved(iterations: int) -> None:
    on = scheduler(2, 2)
    arrive(on, 0.0, spec("one", iterations=iterations))
    for now, phase in ((1.0, "rollout"), (2.0, "train")):
        (permit,) = on.handle(now, ev.PermitRequested(job="one", phase=phase))
        done = ev.PhaseFinished(job="one", phase=phase, seconds=0.5, token=permit.token)
        on.handle(now + 0.5, done)
    node = on.cluster.jobs["one"].home.nodes[1][0]
    made = on.handle(3.0, ev.NodeClosed(node=node, status="draining"))
    assert any(isinstance(each, do.Move) for each in made) == (iterations == 2)
