"""What a simulated job samples does not depend on scheduling."""

from collections import Counter

import numpy as np
import pytest

from rollpacker.polytrace.model.workload import load_model
from rollpacker.sim.workload.workload import DrawnWorkload, Recorded

PAPER = {size: load_model(f"paper-{size}").lengths for size in ("8k", "16k", "32k")}

DOMAINS = {"a": 1.0, "b": 1.0, "c": 2.0}


def workload(seed: int = 0, domains: dict[str, float] | None = None, recorded=()) -> DrawnWorkload:
    return DrawnWorkload(
        PAPER["8k"],
        domains=domains or DOMAINS,
        prompt_tokens=200,
        seed=seed,
        recorded=recorded,
    )


def lengths(of: DrawnWorkload, step: int, prompts, responses: int = 4) -> list[list[int]]:
    return [[of.length(step, p.id, index) for index in range(responses)] for p in prompts]


def test_the_same_seed_gives_the_same_prompts_and_lengths() -> None:
    one, two, other = workload(), workload(), workload(1)
    drawn = one.draw({"a": 5, "b": 5})
    assert drawn == two.draw({"a": 5, "b": 5})
    assert lengths(one, 0, drawn) == lengths(two, 0, drawn)
    assert lengths(other, 0, other.draw({"a": 5, "b": 5})) != lengths(one, 0, drawn)


def test_lengths_do_not_depend_on_the_order_of_asking() -> None:
    one, two = workload(), workload()
    prompts = one.draw({"a": 6})
    two.draw({"a": 6})
    forward = [[one.length(3, p.id, i) for i in range(40)] for p in prompts]
    backward = [[two.length(3, p.id, i) for i in reversed(range(40))] for p in reversed(prompts)]
    assert forward == [row[::-1] for row in reversed(backward)]


def test_a_second_visit_is_sampled_afresh() -> None:
    given = workload()
    prompts = given.draw({"a": 8})
    first, again = lengths(given, 0, prompts), lengths(given, 4, prompts)
    assert first != again
    assert lengths(given, 4, prompts) == again


def test_a_visit_does_not_depend_on_its_step() -> None:
    one, two = workload(), workload()
    prompts = one.draw({"a": 3})
    two.draw({"a": 3})
    assert lengths(one, 0, prompts) == lengths(two, 7, prompts)


def test_domains_are_spread_as_they_count() -> None:
    given = workload()
    drawn = given.draw({"a": 10, "b": 10, "c": 20})
    assert Counter(p.domain for p in drawn) == {"a": 10, "b": 10, "c": 20}
    assert all(2 <= [p.domain for p in drawn[i : i + 8]].count("c") <= 6 for i in range(0, 40, 8))
    assert [given.domain(p.id) for p in drawn] == [p.domain for p in drawn]
    assert given.sizes == {"a": 1000, "b": 1000, "c": 2000}


def test_there_are_always_more_prompts() -> None:
    given = workload(domains={"a": 1.0})
    ids = [p.id for _ in range(50) for p in given.draw({"a": 20})]
    assert len(set(ids)) == 1000
    assert given.remaining()["a"] > 10**9


def test_a_prompt_that_is_done_is_forgotten() -> None:
    given = workload()
    prompt = given.draw({"a": 1})[0].id
    given.length(0, prompt, 0)
    given.forget(prompt)
    with pytest.raises(KeyError):
        given.length(1, prompt, 0)


def test_recorded_prompts_come_first_with_their_lengths() -> None:
    traits = PAPER["8k"].traits(np.random.default_rng(0), 2)
    known = [Recorded(traits[i : i + 1], np.array([11 + i, 22, 33], np.int32)) for i in range(2)]
    given = workload(domains={"a": 1.0}, recorded=known)
    drawn = given.draw({"a": 3})
    assert lengths(given, 0, drawn[:2], 3) == [[11, 22, 33], [12, 22, 33]]
    assert given.length(0, drawn[0].id, 3) > 0
    assert lengths(given, 5, drawn[:1], 3) != [[11, 22, 33]]


def test_programs_run_as_long_in_every_order() -> None:
    one, two = workload(), workload()
    prompt = one.draw({"a": 1})[0].id
    two.draw({"a": 1})
    times = [one.run_s(2, prompt, index) for index in range(200)]
    assert times == [two.run_s(2, prompt, index) for index in reversed(range(200))][::-1]
    assert 0.02 < np.isinf(times).mean() < 0.25
