"""Gradients while all that an engine has waits for environments."""

from __future__ import annotations

import json

import pytest
from policy_world import settings
from talking_world import Talking, finish_all

from rollpacker.core import decisions as do
from rollpacker.core import events as ev
from rollpacker.core.types import AttemptId, EngineId
from rollpacker.policy.gaps import Gaps
from rollpacker.policy.rollout import RolloutPolicy
from rollpacker.policy.settings import RolloutSettings

ROLLOUT = {"prompts_per_step": 4, "num_generations": 2, "streaming": {"group_tokens": 1024}}


def reply(seconds: float, turn: int = 0) -> ev.EnvironmentReplied:
    return ev.EnvironmentReplied(attempt=AttemptId(0), turn=turn, tokens=1, seconds=seconds)


def on(world: Talking, engine: int) -> list[AttemptId]:
    return sorted(a for a, where in world.running.items() if where == engine)


def in_second_step(wait_s: float = 0.5, **rules: object) -> Talking:
    """What gradients and environments take is known; each engine has four attempts in turn 0."""
    world = Talking(settings(ROLLOUT, {"a": 8}, consolidate_below=0, **rules))
    world.start()
    for attempt in sorted(world.running):
        world.reply(attempt)
        world.end_turn(attempt)
        world.tell(ev.EnvironmentReplied(attempt=attempt, turn=0, tokens=3, seconds=wait_s))
        world.end_turn(attempt)
    finish_all(world)
    world.start()
    for attempt in sorted(world.running):
        world.reply(attempt)
    return world


def all_act(world: Talking, engine: int, finished: int = 2) -> None:
    """Of an engine's attempts the first group is complete, the others are at their tools."""
    for attempt in on(world, engine):
        world.end_turn(attempt)
    for attempt in on(world, engine)[:finished]:
        world.finish(attempt, 60)
        world.grade(attempt, float(attempt % 2))


def test_an_engine_whose_attempts_all_act_has_time_for_gradients() -> None:
    world = in_second_step()
    all_act(world, 0)
    assert [replica for replica, _ in world.gradients] == [0]
    assert len(on(world, 0)) == 2
    assert not world.rollout_over


def test_one_attempt_that_decodes_is_enough_to_wait() -> None:
    world = in_second_step()
    all_act(world, 1)
    world.sum_gradients(0)
    for attempt in on(world, 0)[:3]:
        world.end_turn(attempt)
    for attempt in on(world, 0)[:2]:
        world.finish(attempt, 60)
        world.grade(attempt, float(attempt % 2))
    assert [replica for replica, _ in world.gradients] == [1], "the other one has a gap"
    world.end_turn(on(world, 0)[1])
    world.sum_gradients(0)
    assert not world.gradients


def test_a_gap_has_one_task_at_a_time_and_ends_with_a_reply() -> None:
    world = in_second_step()
    all_act(world, 0)
    (first,) = on(world, 1)[:1]
    world.end_turn(first)
    world.finish(first, 60)
    for attempt in on(world, 1)[:1]:
        world.end_turn(attempt)
        world.finish(attempt, 60)
    for place, attempt in enumerate(sorted(world.grading)):
        world.grade(attempt, float(place % 2))
    assert len(world.gradients) == 1
    world.reply(on(world, 0)[0])
    world.sum_gradients(0)
    assert not world.gradients, "it decodes again"
    world.end_turn(on(world, 0)[0])
    assert [replica for replica, _ in world.gradients] == [0]


@pytest.mark.parametrize(
    ("wait_s", "rules"),
    [(1e-5, {}), (0.5, {"stream": False}), (0.5, {"ordered": True}), (0.5, {"gaps": False})],
    ids=["too short", "no streaming", "in order", "as older journals have it"],
)
def test_no_gap_is_filled_that_is_too_short_or_is_not_to_be(
    wait_s: float, rules: dict[str, object]
) -> None:
    world = in_second_step(wait_s, **rules)
    all_act(world, 0)
    assert not world.gradients
    finish_all(world)


def test_a_run_of_before_has_no_gaps() -> None:
    written = settings(ROLLOUT, {"a": 4}).to_json()
    del written["rules"]["gaps"]
    assert not RolloutSettings.from_json(written).rules.gaps


def tokens_of(world: Talking) -> list[int]:
    """Of the samples in each task that is given."""
    lengths = {
        event.attempt: event.tokens
        for event, _ in world.log
        if isinstance(event, ev.AttemptFinished)
    }
    return [
        sum(lengths[world.accepted[part.prompt][n]] for n in range(part.start, part.stop))
        for part in (part for _, parts in world.gradients for part in parts)
    ]


@pytest.mark.parametrize(
    ("lengths", "given"),
    [([5, 90_000], [5]), ([90_000, 95_000], []), ([300, 400], [700]), ([900, 400], [900])],
)
def test_no_task_is_longer_than_its_gap(lengths: list[int], given: list[int]) -> None:
    """A worker does not stop halfway: its engine would stand still."""
    world = in_second_step()
    for attempt in on(world, 0):
        world.end_turn(attempt)
    for attempt, tokens in zip(on(world, 0)[:2], lengths, strict=True):
        world.finish(attempt, tokens)
        world.grade(attempt, float(attempt % 2))
    assert tokens_of(world) == given


def test_what_is_too_long_keeps_nothing_else_waiting() -> None:
    world = in_second_step()
    for attempt in [*on(world, 0), *on(world, 1)]:
        world.end_turn(attempt)
    for attempt, tokens in zip(on(world, 1)[:2], (90_000, 95_000), strict=True):
        world.finish(attempt, tokens)
        world.grade(attempt, float(attempt % 2))
    assert not world.gradients
    all_act(world, 0)
    assert tokens_of(world) == [120]


def test_before_anything_is_measured_nobody_guesses() -> None:
    world = Talking(settings(ROLLOUT, {"a": 4}, consolidate_below=0))
    world.start()
    for attempt in sorted(world.running):
        world.reply(attempt)
    all_act(world, 0)
    assert not world.gradients


def test_what_is_known_of_waits_outlives_a_step() -> None:
    world = in_second_step()
    again = RolloutPolicy(world.settings)
    again.load_state_dict(json.loads(json.dumps(world.policy.state_dict())))
    assert again.state_dict() == world.policy.state_dict()
    older = world.policy.state_dict()
    del older["gaps"]
    RolloutPolicy(world.settings).load_state_dict(older)


def test_what_fits_is_the_usual_wait_until_the_first_of_them_goes_on() -> None:
    gaps = Gaps()
    gaps.replied(reply(9.0, turn=-1))
    gaps.trained(1000, 1.0)
    assert gaps.tokens(1) == 0, "a beginning is no wait"
    for _ in range(2_000):
        gaps.replied(reply(0.4))
    gaps.replied(reply(400.0))
    assert gaps.tokens(1) == pytest.approx(400, rel=0.05)
    assert gaps.tokens(4) == pytest.approx(100, rel=0.05)
    assert gaps.tokens(0) == 0
    assert Gaps().tokens(1) == 0


def test_a_slow_first_call_is_soon_forgotten() -> None:
    gaps = Gaps()
    gaps.trained(1000, 1.0)
    gaps.replied(reply(60.0))
    for _ in range(30):
        gaps.replied(reply(0.1))
    assert gaps.tokens(1) < 150


def test_replayed_decisions_are_the_same() -> None:
    world = in_second_step()
    all_act(world, 0)
    finish_all(world)
    again = RolloutPolicy(world.settings)
    for now, (event, made) in enumerate(world.log, 1):
        assert again.handle(float(now), event) == made
    sums = [d for _, made in world.log for d in made if isinstance(d, do.AccumulateGradients)]
    assert sums
    assert {each.replica for each in sums} == {EngineId(0), EngineId(1)}
