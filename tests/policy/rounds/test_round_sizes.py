"""How many prompts a round begins and waits for, and when empty steps stop the run."""

from __future__ import annotations

import json
import math
from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollpacker.config import DynamicSamplingConfig
from rollpacker.core.groups import over_provision
from rollpacker.core.types import Prompt, PromptId, RoundKind
from rollpacker.policy.grading import EmptySteps
from rollpacker.policy.rounds.race import Carrying, Racing, plan_round, split

weights = st.dictionaries(
    st.text(min_size=1, max_size=3), st.floats(0, 1e6, allow_nan=False), min_size=1, max_size=6
).filter(lambda w: sum(w.values()) > 1e-6)


@given(st.integers(0, 5000), weights)
def test_parts_sum_to_the_total_and_are_within_one_of_their_share(total, shares):
    parts = split(total, shares)
    assert sum(parts.values()) == total
    assert list(parts) == list(shares)
    whole = math.fsum(shares.values())
    for name, weight in shares.items():
        assert abs(parts[name] - total * weight / whole) < 1 + 1e-6
        assert parts[name] >= 0


def test_thirds_go_to_the_earlier_domains():
    assert split(128, {"math": 1, "code": 1, "judge": 1}) == {"math": 43, "code": 43, "judge": 42}
    assert split(16, {"a": 1 / 3, "b": 1 / 3, "c": 1 / 3}) == {"a": 6, "b": 5, "c": 5}


def test_a_domain_without_weight_gets_nothing():
    assert split(7, {"a": 0, "b": 2}) == {"a": 0, "b": 7}


@pytest.mark.parametrize("bad", [{"a": -1.0}, {"a": math.inf}, {"a": math.nan}, {"a": 0.0}, {}])
def test_weights_that_split_nothing_are_refused(bad):
    with pytest.raises(ValueError, match="weight"):
        split(4, bad)


@given(st.integers(0, 2000), st.integers(100, 400))
def test_over_provision_is_the_exact_ceiling(count, percent):
    assert over_provision(count, percent / 100) == math.ceil(Fraction(percent, 100) * count)


@pytest.mark.parametrize(
    ("queued", "steps", "kind", "taken", "updates"),
    [
        (3, 1, RoundKind.SHORT, 0, 1),
        (4, 1, RoundKind.LONG, 4, 1),
        (7, 2, RoundKind.SHORT, 0, 1),
        (8, 2, RoundKind.LONG, 8, 2),
    ],
)
def test_a_long_round_runs_as_soon_as_the_queue_has_its_prompts(
    queued, steps, kind, taken, updates
):
    plan = plan_round(
        prompts=4,
        responses=2,
        racing=Racing(eta_prompts=1.25),
        queued=queued,
        sizes={"a": 20},
        remaining={"a": 10},
        long_steps=steps,
    )
    assert (plan.kind, plan.queued, plan.updates) == (kind, taken, updates)


# When a run stops whose steps dynamic sampling leaves empty.


@given(st.lists(st.integers(0, 2)), st.integers(1, 4))
def test_so_many_empty_steps_in_a_row_are_too_many(groups: list[int], most: int) -> None:
    steps = EmptySteps(DynamicSamplingConfig(enabled=True, max_empty_steps=most))
    for at, count in enumerate(groups, start=1):
        in_a_row = next((n for n, each in enumerate(reversed(groups[:at])) if each), at)
        assert steps.too_many(count) == (in_a_row >= most)
        assert steps.in_a_row == in_a_row


@given(st.integers(1, 50), st.booleans())
def test_without_a_limit_or_dynamic_sampling_there_are_never_too_many(
    count: int, enabled: bool
) -> None:
    steps = EmptySteps(DynamicSamplingConfig(enabled=enabled, max_empty_steps=3 * (not enabled)))
    assert not any(steps.too_many(0) for _ in range(count))


@given(st.lists(st.integers(0, 1)), st.integers(1, 4))
def test_a_run_that_starts_again_after_every_step_counts_on(groups: list[int], most: int) -> None:
    config = DynamicSamplingConfig(enabled=True, max_empty_steps=most)
    steps = EmptySteps(config)
    for count in groups:
        again = EmptySteps(config)
        again.load_state_dict(json.loads(json.dumps(steps.state_dict())))
        assert again.too_many(count) == steps.too_many(count)
        assert str(again) == str(steps)


# Partial rollouts: what a round begins, and which prompts it waits for.


def prompts(domain: str, ages: list[int]) -> list[Prompt]:
    return [Prompt(id=PromptId(f"{domain}{i}"), domain=domain) for i in range(len(ages))]


@given(
    st.integers(1, 8),
    st.sampled_from([1.0, 1.25, 2.0, 4.0]),
    st.integers(1, 3),
    st.dictionaries(st.sampled_from("abc"), st.lists(st.integers(1, 3), max_size=9), max_size=3),
    st.dictionaries(st.sampled_from("abc"), st.integers(0, 30), max_size=3),
)
def test_the_queue_begins_first_and_fresh_prompts_fill_up(wanted, eta, most, queued, fresh):
    sizes, step = dict.fromkeys("abc", 10), 10
    queue = [p for domain, ages in queued.items() for p in prompts(domain, ages)]
    if not queue and not any(fresh.values()):
        return
    carrying = Carrying(most)
    for domain, ages in queued.items():
        for prompt, age in zip(prompts(domain, ages), ages, strict=True):
            carrying.defer(prompt.id, step - min(age, most))
    plan, begun, due = carrying.plan(
        step,
        prompts=wanted,
        responses=3,
        eta_prompts=eta,
        queue=queue,
        sizes=sizes,
        remaining=fresh,
    )
    available = Counter(p.domain for p in queue) + Counter(fresh)
    must = [p for p in queue if p.id in due]
    assert sum(plan.quotas.values()) == max(len(must), min(wanted, available.total()))
    assert plan.queued == len(begun)
    assert set(must) <= set(begun)
    assert {p.domain for p in queue} - {p.domain for p in begun} <= set("abc") - set(plan.quotas)
    for domain, quota in plan.quotas.items():
        assert sum(p.domain == domain for p in must) <= quota <= available[domain]
    started = Counter(p.domain for p in begun) + Counter(plan.draws)
    for domain, count in plan.draws.items():
        assert 0 < count <= fresh[domain]
        assert started[domain] <= plan.quotas[domain] * (1 + most)
    assert (plan.kind is RoundKind.SHORT) == (started.total() > sum(plan.quotas.values()))


@given(st.integers(1, 4), st.integers(1, 3), st.lists(st.integers(1, 4), min_size=1, max_size=16))
def test_no_more_stay_than_the_rounds_that_are_left_can_take(most, quota, ages):
    """As many are waited for as must be, the oldest, and no more."""
    step, ages = 10, sorted((min(age, most) for age in ages), reverse=True)
    queue, carrying = prompts("a", ages), Carrying(most)
    for prompt, age in zip(queue, ages, strict=True):
        carrying.defer(prompt.id, step - age)
        carrying.defer(prompt.id, step - 1)  # it lost again
    due = carrying.due(queue, {"a": quota}, step)
    assert due == {prompt.id for prompt in queue[: len(due)]}

    def fits(ages: list[int]) -> bool:
        """Whether rounds of ``quota`` from the next one on are in time for all."""
        return all(len([a for a in ages if a >= most - k]) <= k * quota for k in range(most))

    assert fits(ages[len(due) :])
    assert not due or not fits(ages[len(due) - 1 :])


def test_what_is_trained_on_is_forgotten_and_the_state_comes_back():
    carrying = Carrying(2)
    queue = prompts("a", [2, 1])
    for prompt in queue:
        carrying.defer(prompt.id, 0)
    carrying.forget(queue[0].id)
    carrying.defer(queue[0].id, 2)
    again = Carrying(2)
    again.load_state_dict(carrying.state_dict())
    assert again.due(queue, {"a": 1}, 2) == {queue[1].id}
    again.clear()
    assert again.state_dict() == {}
