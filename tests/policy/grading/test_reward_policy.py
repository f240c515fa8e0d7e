"""Timeouts stay in their bounds, a judge's budget grows with memory and is never exceeded."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rollpacker.config import CodeTimeoutConfig
from rollpacker.policy.grading import (
    IN_A_ROW,
    RESPONSES,
    AdaptiveTimeouts,
    JudgeBudget,
    JudgeModel,
    RewardFaults,
)

graded = st.lists(
    st.tuples(st.sampled_from("abc"), st.floats(0, 60, allow_nan=False), st.booleans()), max_size=30
)


@given(graded, st.booleans())
def test_timeouts_follow_the_longest_correct_time_within_their_bounds(history, at_once):
    timeouts = AdaptiveTimeouts(CodeTimeoutConfig(), at_once=at_once)
    for case, seconds, correct in history:
        before = timeouts.timeout(case)
        timeouts.observe(case, seconds, correct)
        if not correct or not at_once:
            assert timeouts.timeout(case) == before
    timeouts.advance()
    for case in "abc":
        right = [seconds for one, seconds, correct in history if one == case and correct]
        expected = min(max(2.0, 1.5 * max(right)), 30.0) if right else 30.0
        assert timeouts.timeout(case) == expected


@given(graded, st.randoms())
def test_by_step_the_order_of_grading_does_not_matter(history, random):
    def after(order: list[tuple[str, float, bool]]) -> list[float]:
        timeouts = AdaptiveTimeouts(CodeTimeoutConfig(), at_once=False)
        seen = []
        for case, seconds, correct in order:
            seen.append(timeouts.timeout(case))
            timeouts.observe(case, seconds, correct)
        timeouts.advance()
        return [*seen, *map(timeouts.timeout, "abc")]

    assert after(history) == after(random.sample(history, len(history)))


@given(graded, st.integers(0, 4), st.booleans())
@example([("a", 4.0, True), ("b", 5.0, True)], 1, False)
def test_timeouts_survive_a_checkpoint(history, cut, at_once):
    first, second = (AdaptiveTimeouts(CodeTimeoutConfig(), at_once=at_once) for _ in "ab")
    for place, seen in enumerate(history):
        if place == cut:
            restored = AdaptiveTimeouts(CodeTimeoutConfig(), at_once=at_once)
            restored.load_state_dict(json.loads(json.dumps(second.state_dict())))
            second = restored
        first.observe(*seen)
        second.observe(*seen)
    first.advance()
    second.advance()
    assert [*map(first.timeout, "abc")] == [*map(second.timeout, "abc")]


def test_the_least_recently_seen_test_cases_are_forgotten():
    timeouts = AdaptiveTimeouts(CodeTimeoutConfig(), cases=2)
    for case in ("a", "b", "a", "c"):
        timeouts.observe(case, 4.0, True)
    assert [timeouts.timeout(case) for case in "abc"] == [6.0, 30.0, 6.0]


@pytest.mark.parametrize("bad", [{"factor": 0.5}, {"least_s": 0.0}, {"least_s": 40.0}])
def test_impossible_timeouts_are_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        CodeTimeoutConfig(**bad)


def test_a_fixed_timeout_is_the_longest():
    timeouts = AdaptiveTimeouts(CodeTimeoutConfig(adaptive=False))
    timeouts.observe("a", 4.0, True)
    assert timeouts.timeout("a") == 30.0


models = st.builds(
    JudgeModel,
    layers=st.integers(1, 40),
    layer_bytes=st.integers(1, 1000),
    fixed_bytes=st.integers(0, 2000),
    token_bytes=st.floats(0.01, 5.0),
    token_seconds=st.floats(1e-6, 1e-3),
    copy_seconds=st.floats(1e-4, 1.0),
)
queues = st.lists(st.integers(1, 2000), max_size=20)


@given(models, queues, st.floats(0, 1.2), st.integers(1, 8))
def test_a_budget_is_never_exceeded_and_has_a_resident_layer(model, waiting, share, most):
    free = share * model.bytes_needed(model.layers, sum(waiting))
    plan = JudgeBudget(model, most).decide(waiting, free)
    smallest = model.bytes_needed(1, min(waiting, default=0))
    if not waiting or smallest > free:
        assert plan is None
        return
    assert plan is not None
    assert 1 <= plan.resident <= model.layers
    assert 1 <= plan.concurrency <= min(most, len(waiting))
    tokens = sum(sorted(waiting)[: plan.concurrency])
    assert model.bytes_needed(plan.resident, tokens) <= free


@given(models, queues, st.lists(st.floats(0, 1.2), min_size=2, max_size=6))
def test_more_memory_never_means_fewer_layers_or_sequences(model, waiting, shares):
    budget, whole = JudgeBudget(model), model.bytes_needed(model.layers, sum(waiting))
    plans = [budget.decide(waiting, share * whole) for share in sorted(shares)]
    sizes = [(0, 0) if plan is None else (plan.concurrency, plan.resident) for plan in plans]
    assert [n for n, _ in sizes] == sorted(n for n, _ in sizes)
    assert [r for _, r in sizes] == sorted(r for _, r in sizes)


JUDGE_7B = JudgeModel(
    layers=28,
    layer_bytes=466_000_000,
    fixed_bytes=2_200_000_000,
    token_bytes=60_000.0,
    token_seconds=466e6 / 400e12,
    copy_seconds=466e6 / 25e9,
)


def test_two_layers_more_than_are_resident_are_held_and_never_more_than_all():
    model = JudgeModel(
        layers=5, layer_bytes=10, fixed_bytes=7, token_bytes=2, token_seconds=1, copy_seconds=1
    )
    assert [model.bytes_needed(resident, 3) for resident in (1, 2, 3, 5)] == [43, 53, 63, 63]


def test_long_inputs_hide_copies_and_leave_memory_to_the_actor():
    """One sequence of 32k tokens computes longer in a layer than the next one takes to come."""
    long = JudgeBudget(JUDGE_7B).decide([32_768] * 4, 80e9)
    short = JudgeBudget(JUDGE_7B).decide([500] * 4, 80e9)
    assert long is not None
    assert short is not None
    assert (long.concurrency, long.resident) == (1, 1)
    assert short.resident == 28 or short.concurrency == 4
    assert short.resident > long.resident


def test_a_judge_with_three_layers_or_fewer_is_whole():
    tiny = JudgeModel(
        layers=3, layer_bytes=1, fixed_bytes=0, token_bytes=0.0, token_seconds=1e-9, copy_seconds=1
    )
    plan = JudgeBudget(tiny).decide([1], 3.0)
    assert plan is not None
    assert plan.resident == 3


# When a reward function counts as broken.


def first_broken(faults: RewardFaults, calls: list[tuple[int, str, str]]) -> int | None:
    """Which of the failed calls, from 1, tells that function 0 is broken."""
    for number, (response, prompt, way) in enumerate(calls, 1):
        if faults.failed(0, response, prompt, way):
            return number
    return None


def test_three_prompts_that_fail_alike() -> None:
    calls = [(i, f"p{i}", "late") for i in range(5)]
    faults = RewardFaults(1)
    assert first_broken(faults, calls) == 3
    assert faults.counts(0) == (3, 3)
    assert faults.suspects() == [0]
    assert faults.tried(0, "p1")
    assert not faults.tried(0, "p4")


def test_repeated_calls_for_one_response_count_once() -> None:
    calls = [(i // 4, f"p{i // 4}", "late") for i in range(40)]
    assert first_broken(RewardFaults(1), calls) == 9


def test_one_bad_prompt_is_no_broken_function_but_eight_responses_are() -> None:
    assert first_broken(RewardFaults(1), [(i, "p", "late") for i in range(7)]) is None
    assert first_broken(RewardFaults(1), [(i, "p", "late") for i in range(20)]) == RESPONSES


def test_faults_of_other_kinds_are_counted_apart() -> None:
    kinds = [(i, f"p{i}", "abcd"[i % 4]) for i in range(20)]
    faults = RewardFaults(1)
    assert first_broken(faults, kinds) == RESPONSES
    assert faults.counts(0) == (2, 8)


def test_an_answer_clears_it_and_asks_for_much_more() -> None:
    faults = RewardFaults(2)
    for turn in range(50):
        assert (
            first_broken(faults, [(2 * turn + i, f"p{turn}{i}", "late") for i in range(2)]) is None
        )
        faults.answered(0)
        assert not faults.suspects()
    calls = [(1000 + i, f"p{i}", "late") for i in range(100)]
    assert first_broken(faults, calls) == IN_A_ROW
    assert not faults.failed(1, 1, "p", "late")


def test_who_fails_for_the_machines_faults_is_given_time() -> None:
    calls = [(i, f"p{i}", "no core was free") for i in range(100)]
    assert first_broken(RewardFaults(1, patient=[0]), calls) == IN_A_ROW
