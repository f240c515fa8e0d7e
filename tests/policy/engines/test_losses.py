"""Engines and replicas that die one without the other: what is summed, and where."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from policy_world import World, local_machine
from policy_world import settings as make_settings

from rollpacker.core.types import EngineId, ReplicaId
from rollpacker.policy.engines.fleet import Layout

ROLLOUT = {"prompts_per_step": 6, "num_generations": 2, "streaming": {"group_tokens": 64}}


def started(workers: int, replica_engines: int, layout: Layout = "colocated", moves: bool = False):
    given = make_settings(
        ROLLOUT,
        {"a": 30},
        replica_engines=replica_engines,
        layout=layout,
        machine=local_machine(workers, replica_engines) if moves else None,
    )
    world = World(given, workers)
    world.start()
    return world


def finish_engine(world: World, engine: int, tokens: int = 50) -> None:
    for attempt in sorted(a for a, on in world.running.items() if on == engine):
        world.finish(attempt, tokens)
    for place, attempt in enumerate(sorted(world.grading)):
        world.grade(attempt, float(place % 2))


def training(world: World) -> set[int]:
    return {replica for replica, _ in world.gradients}


def lose_some(world: World, data: st.DataObject) -> None:
    """Anything may die that leaves an engine and a replica."""
    dead, gone = (
        data.draw(st.lists(st.sampled_from(live), unique=True, max_size=min(2, len(live) - 1)))
        for live in (world.workers, world.replicas)
    )
    if dead or gone:
        world.lose_devices(dead, gone)


def go_on(world: World, data: st.DataObject) -> None:
    """Whatever is under way may end, in any order."""
    kind = data.draw(
        st.sampled_from([k for k in ("running", "grading", "moving") if getattr(world, k)] or [""])
    )
    if world.gradients and (not kind or data.draw(st.booleans())):
        world.sum_gradients(data.draw(st.integers(0, len(world.gradients) - 1)))
    elif kind == "running":
        world.finish(data.draw(st.sampled_from(sorted(world.running))), data.draw(lengths))
    elif kind == "grading":
        world.grade(min(world.grading), data.draw(st.sampled_from([0.0, 1.0])))
    elif kind == "moving":
        world.confirm_move(min(world.moving))
    elif world.applying:
        world.apply()


lengths = st.integers(1, 2000)


@settings(max_examples=settings().max_examples // 2)
@given(
    workers=st.integers(2, 6),
    replica_engines=st.integers(1, 3),
    layout=st.sampled_from(["colocated", "separate"]),
    moves=st.booleans(),
    data=st.data(),
)
def test_every_part_is_summed_once_whatever_dies(workers, replica_engines, layout, moves, data):
    """``World`` proves it: of each update, and that no replica is given gradients while an engine
    on its devices decodes."""
    world = started(workers, replica_engines, layout, moves)
    for _ in range(2):
        for turn in range(400):
            if world.over:
                break
            if turn % 5 == 4:
                lose_some(world, data)
            go_on(world, data)
        assert world.over
        assert len(world.updated) == 12
        world.start()


def end_step(world: World) -> None:
    while not world.over:
        assert not world.idle(), "nothing is left to happen"
        for engine in list(world.workers):
            finish_engine(world, engine)
        while world.gradients:
            world.sum_gradients(0)
        if world.applying:
            world.apply()


def test_the_engines_of_a_lost_replica_are_nobody_elses() -> None:
    world = started(4, 2)
    world.lose_devices([], [ReplicaId(2)])
    for _ in range(2):
        finish_engine(world, 0)
        assert not training(world), "engine 1 decodes"
        finish_engine(world, 1)
        assert training(world) == {0}, "engines 2 and 3 decode, but on nobody's devices"
        end_step(world)
        world.start()


def test_a_replica_whose_engines_are_gone_trains_at_once() -> None:
    world = started(3, 1)
    world.lose_devices([EngineId(0)], [])
    finish_engine(world, 1, tokens=1000)
    assert set(world.running.values()) >= {EngineId(2)}
    assert 0 in training(world)


def test_it_does_so_too_in_the_steps_that_follow() -> None:
    world = started(3, 1)
    world.lose_devices([EngineId(0)], [])
    end_step(world)
    world.start()
    finish_engine(world, 1)
    assert training(world)
    assert 2 not in training(world)


@pytest.mark.parametrize("idle", [False, True])
def test_a_replica_that_dies_before_an_update_changes_weights_costs_its_sums(idle: bool) -> None:
    world = started(3, 1)
    while not world.applying:
        for engine in list(world.workers):
            finish_engine(world, engine)
        while world.gradients:
            world.sum_gradients(0)
    lost = max(set(world.summed.values()))
    if idle:
        world.lose_devices([], [ReplicaId(n) for n in range(3) if n != lost])
        assert set(world.summed.values()) <= {lost}
    else:
        world.lose_devices([], [lost])
        assert not world.applying, "its sums are missing"
    end_step(world)
    assert len(world.updated) == 12
    world.lose_devices([], world.replicas[1:])
    assert not world.gradients, "the step is over"
    world.start()
    end_step(world)
