"""Partial rollouts: what a round begins, and which prompts it waits for."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from rollpacker.core.types import Prompt, PromptId, RoundKind
from rollpacker.policy.rounds.race import Carrying


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
