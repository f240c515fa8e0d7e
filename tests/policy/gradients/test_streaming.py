"""What streaming gains: early gradients, a consolidated tail, workers that end together."""

from __future__ import annotations

from policy_world import World, local_machine, settings

from rollpacker.core import decisions as do
from rollpacker.core import events as ev
from rollpacker.core.types import EngineId
from rollpacker.policy.engines.fleet import tail_engines

ROLLOUT = {"prompts_per_step": 4, "num_generations": 2, "streaming": {"group_tokens": 1024}}


def started(**rules: object) -> World:
    world = World(settings(ROLLOUT, {"a": 4}, **rules))
    world.start()
    return world


def finish_worker(world: World, worker: int, tokens: int, leave: int = 0) -> None:
    mine = sorted(a for a, w in world.running.items() if w == worker)
    for attempt in mine[: len(mine) - leave]:
        world.finish(attempt, tokens)
    for place, attempt in enumerate(sorted(world.grading)):
        world.grade(attempt, float(place % 2))


def test_a_worker_that_the_tail_has_freed_starts_gradients() -> None:
    world = started()
    finish_worker(world, 0, tokens=50)
    assert {worker for worker, _ in world.gradients} == {EngineId(0)}
    assert world.running


def test_without_streaming_gradients_wait_for_the_rollout() -> None:
    world = started(stream=False)
    finish_worker(world, 0, tokens=50)
    assert not world.gradients
    finish_worker(world, 1, tokens=50)
    assert world.gradients


def test_long_groups_are_cut_so_that_both_workers_share_the_last_one() -> None:
    world = started()
    finish_worker(world, 0, tokens=5)
    while world.gradients:
        world.sum_gradients(0)
    finish_worker(world, 1, tokens=2000)
    assert {worker for worker, _ in world.gradients} == {EngineId(0), EngineId(1)}
    assert all(part.stop - part.start == 1 for _, parts in world.gradients for part in parts)


def test_groups_without_variance_cost_nothing_and_go_together() -> None:
    world = started()
    for attempt in sorted(world.running):
        world.finish(attempt, 700)
    for attempt in sorted(world.grading):
        world.grade(attempt, 1.0)
    assert [len(parts) for _, parts in world.gradients] == [4]


def fixed(fraction: float) -> World:
    streaming = {"group_tokens": 1, "scaling": "fixed", "scaling_fraction": fraction}
    rollout = ROLLOUT | {"streaming": streaming}
    world = World(settings(rollout, {"a": 4}, machine=local_machine(2)))
    world.start()
    return world


def test_at_a_fixed_fraction_one_of_two_workers_is_freed_and_starts_gradients() -> None:
    world = fixed(0.5)
    for attempt in sorted(world.running)[:3]:
        world.finish(attempt, 50)
        assert not world.moving
    world.finish(min(world.running), 50)
    (target,) = set(world.moving.values())
    freed = EngineId(1 - target)
    assert freed not in {w for a, w in world.running.items() if a not in world.moving}
    for attempt in sorted(world.moving):
        world.confirm_move(attempt)
    for place, attempt in enumerate(sorted(world.grading)):
        world.grade(attempt, float(place % 2))
    assert {worker for worker, _ in world.gradients} == {freed}


def test_a_freed_worker_that_dies_before_its_attempts_have_moved_takes_none_with_it() -> None:
    world = fixed(0.25)
    for attempt in sorted(world.running)[-2:]:
        world.finish(attempt, 50)
    (source,) = {world.running[attempt] for attempt in world.moving}
    world.lose(source)
    assert len(world.running) == 6
    assert set(world.running.values()) == set(world.workers)


def moves_of(world: World) -> list[do.MigrateAttempts]:
    return [d for _, made in world.log for d in made if isinstance(d, do.MigrateAttempts)]


def test_a_tail_is_offered_once_and_leaves_its_nodes_only_when_somebody_takes_them() -> None:
    shape = {"prompts_per_step": 8, "num_generations": 4, "streaming": {"group_tokens": 8}}
    given = settings(shape, {"a": 8}, tail_engines=1)
    world = World(given, workers=4)
    world.start()
    on = [sorted(a for a, w in world.running.items() if w == worker) for worker in world.workers]
    attempts = [attempt for each in zip(*on, strict=True) for attempt in each]
    for attempt in attempts[:25]:
        world.finish(attempt, 9)
    assert not offers_of(world)
    for attempt in attempts[25:27]:
        world.finish(attempt, 9)
    assert len(offers_of(world)) == 1
    assert not moves_of(world)
    assert len(set(world.running.values())) == 4
    world.tell(ev.TailReleased())
    kept = {move.target for move in moves_of(world)}
    assert len(kept) == 1
    assert {a for m in moves_of(world) for a in m.attempts} | {
        a for a, worker in world.running.items() if worker in kept
    } == set(attempts[27:])
    for place, attempt in enumerate(sorted(world.grading)):
        world.grade(attempt, float(place % 2))
    # Complete groups wait: the freed workers have no node to sum gradients on.
    assert not world.gradients
    for attempt in sorted(world.moving):
        world.confirm_move(attempt)
    for attempt in sorted(world.running):
        world.finish(attempt, 50)
        world.grade(attempt, 1.0)
    assert len(offers_of(world)) == 1
    assert {worker for worker, _ in world.gradients} == set(world.workers)


def offers_of(world: World) -> list[do.OfferTail]:
    return [d for _, made in world.log for d in made if isinstance(d, do.OfferTail)]


def test_a_quarter_of_the_workers_keeps_a_tail() -> None:
    assert [tail_engines(count) for count in (1, 2, 4, 5, 8)] == [0, 1, 1, 2, 2]


def task_tokens(world: World) -> list[int]:
    return [sum((part.stop - part.start) * 1000 for part in parts) for _, parts in world.gradients]


def test_tasks_fill_micro_batches_once_the_rollout_is_over() -> None:
    """32 prompts x 8 responses of 1,000 tokens: 131 tasks of a micro-batch each before."""
    shape = {"prompts_per_step": 32, "num_generations": 8, "streaming": {"group_tokens": 2048}}
    world = World(settings(shape, {"a": 32}, stream=False), 1)
    world.start()
    finish_worker(world, 0, tokens=1000)
    sizes: list[int] = []
    while world.gradients:
        sizes += task_tokens(world)[:1]
        world.sum_gradients(0)
    assert sum(sizes) == 256_000
    assert max(sizes) > 8 * 2048 - 1000
    assert len(sizes) < 30
    assert sorted(sizes, reverse=True)[0] == sizes[0]


def test_an_engine_sleeps_before_gradients_are_summed_beside_it() -> None:
    world = started(turns=True)
    finish_worker(world, 0, tokens=50)
    assert not world.gradients
    assert world.lying_down == {EngineId(0)}
    world.confirm_sleep(EngineId(0))
    assert {replica for replica, _ in world.gradients} == {0}
    finish_worker(world, 1, tokens=50)
    assert world.lying_down == {EngineId(1)}
    world.confirm_sleep(EngineId(1))
    while world.gradients:
        world.sum_gradients(0)
    assert world.applying


def test_the_last_engine_stays_awake_until_the_rollout_is_over() -> None:
    world = started(turns=True)
    world.lose_devices([EngineId(1)], [])
    for attempt in sorted(world.running)[:-1]:
        world.finish(attempt, 50)
    assert not world.lying_down
    assert not world.gradients
