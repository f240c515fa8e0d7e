"""Functions that only fail are given up after a few calls, those that fail now and then are not."""

import asyncio
import dataclasses

import pytest
from pool_helpers import collect, processes_of, requests

from grading import grade_now
from rollpacker.config import RewardConfig


def reward(code, act: str, **settings) -> RewardConfig:
    return RewardConfig(function=f"{code}:{act}", **{"timeout_s": 1.0} | settings)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_function_that_hangs_is_given_up_after_three_prompts(pool_of, code, workers):
    pool = pool_of(reward(code, "act", timeout_s=0.2), workers=workers)
    pool.wait_ready()
    grades = asyncio.run(collect(pool, lambda: pool.submit(requests(["hang"] * 40)), 40))
    assert pool.broken == (
        "rewards.0: reward 'act' timed out 3 of 3: timed out after 0.2 s: fix it, give it longer "
        "(rewards.0.timeout_s), or go on without it (rewards.0.on_error=skip)"
    )
    assert pool.trouble() == "reward 'act' timed out 3 of 3"
    assert all(grade.reward is None for grade in grades)


def test_a_function_that_raises_is_given_up_with_its_line(pool_of, code):
    pool = pool_of(reward(code, "act"))
    grade_now(pool, requests(["raise"] * 40))
    assert f"{code}:7 in act: KeyError: 'no\\nsuch key': fix it or go on without" in pool.broken
    # Nothing is called any more.
    assert grade_now(pool, requests(["1"], first=100))[0].error == pool.broken


def test_a_function_whose_process_dies_is_given_up(pool_of, code):
    pool = pool_of(reward(code, "act"))
    grade_now(pool, requests(["kill"] * 40))
    assert "reward 'act' failed 3 of 3: its process was killed by signal 9" in pool.broken


def test_slow_ones_among_good_ones_end_nothing(pool_of, code):
    pool = pool_of(reward(code, "act", timeout_s=0.5), retries=0)
    texts = ["hang", "hang", *["1"] * 10, "hang", *["raise"] * 20, "2", "hang"]
    grades = grade_now(pool, requests(texts))
    assert pool.broken is None
    assert pool.trouble() == "reward 'act' timed out 1 of 1" or pool.trouble() is None
    assert [g.reward for g in grades] == [{"1": 1.0, "2": 2.0}.get(text) for text in texts]


def test_while_all_fail_another_prompt_is_tried_next(pool_of, code):
    """A row that makes every function slow is no reason to stop, wherever it stands."""
    pool = pool_of(reward(code, "act", timeout_s=0.5), retries=0)
    texts = ["hang"] * 3 + ["raise"] * 6
    bad = [request_of(text, i, "bad") for i, text in enumerate(texts)]
    grades = grade_now(pool, [*bad, request_of("1", 10, "good"), request_of("2", 11, "good")])
    assert pool.broken is None
    assert [g.reward for g in grades] == [None] * 9 + [1.0, 2.0]


def test_a_function_can_be_skipped(pool_of, code):
    hangs = reward(code, "act", on_error="skip", name="a", timeout_s=0.2)
    pool = pool_of(hangs, reward(code, "length"), workers=2)
    grades = grade_now(pool, requests(["hang"] * 20))
    assert [g.reward for g in grades] == [4.0] * 20
    assert all(g.rewards == {"a": None, "length": 4.0} and g.error is None for g in grades)
    assert pool.broken is None
    assert pool.trouble() is None
    said = [line for line in pool.said() if line.startswith("WARNING")]
    assert said == [
        "WARNING reward 'a' timed out 3 of 3: timed out after 0.2 s: the run goes on without it "
        "(rewards.0.on_error=skip)"
    ]
    # It is not called any more, or its process would be killed again.
    pool.wait_ready()
    processes = processes_of(pool)
    (later,) = grade_now(pool, requests(["hang"], first=50))
    assert (later.reward, processes_of(pool)) == (4.0, processes)


def test_a_skipped_function_of_a_group_or_of_shared_calls(pool_of, code):
    pool = pool_of(
        reward(code, "act", on_error="skip", name="a", needs_group=True),
        reward(code, "act", on_error="skip", name="b", batch=4),
        reward(code, "length"),
    )
    grades = []
    for group in range(5):
        texts = ["raise", "raise"]
        both = [request_of(t, 10 * group + i, f"g{group}") for i, t in enumerate(texts)]
        grades += grade_now(pool, both, group=True)
    assert pool.broken is None
    assert [g.reward for g in grades[-2:]] == [5.0, 5.0]


def test_without_the_last_function_there_is_nothing_to_skip_to(pool_of, code):
    pool = pool_of(reward(code, "act", on_error="skip"))
    grade_now(pool, requests(["raise"] * 9))
    assert pool.broken.endswith(": without it there is no reward left")


def test_what_is_logged_is_in_the_grade(pool_of, code):
    code.write_text(
        code.read_text()
        + """
def logs(completions, log_extra, log_metric, trainer_state, **_):
    log_extra("upper", [c.upper() for c in completions])
    log_metric("length", len(completions[0]))
    return [float("nan")]

def verl(solution_str, extra_info):
    return {"score": 1.0, "length": 4.0, "extracted": solution_str[:1]}

def floods(completions, log_extra, **_):
    for number in range(200):
        log_extra(f"c{number}", ["x" * 10_000])
    return [1.0]
"""
    )
    pool = pool_of("logs", "verl", "act")
    grade, failed = grade_now(pool, requests(["12", "text"]))
    assert grade.rewards == {"logs": None, "verl": 1.0, "act": 12.0}
    assert grade.extra == {"upper": "12", "extracted": "1"}
    assert grade.metrics == {"length": 2.0, "reward_extra/length/mean": 4.0}
    # Those that were called are known of one that failed, too.
    assert (failed.reward, failed.rewards) == (None, {"verl": 1.0})
    (grade,) = grade_now(pool_of("floods"), requests(["1"]))
    assert grade.error == "reward 'floods': logged more than 1 MiB in one call"


def request_of(text: str, attempt: int, source: str):
    return dataclasses.replace(requests([text], first=attempt)[0], source=source)
