import asyncio
import os
import signal
import time
from array import array

import pytest
import reasoning_gym
from pool_helpers import collect, processes_of, requests
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from grading import grade_now
from rollpacker.config import GradingConfig, RewardConfig
from rollpacker.core.types import AttemptId
from rollpacker.response_text import ResponseText
from rollpacker.reward.base import GradeRequest
from rollpacker.reward.processes.pool import GradingPool


def test_grades_in_order_and_weighted_sums(pool_of, code):
    pool = pool_of(
        RewardConfig(function=f"{code}:act"),
        RewardConfig(function=f"{code}:length", name="len", weight=-0.5),
        RewardConfig(function=f"{code}:never"),
    )
    grades = grade_now(pool, requests(["1", "10", "none"]))
    assert [g.attempt for g in grades] == [0, 1, 2]
    assert [g.reward for g in grades] == [0.5, 9.0, -2.0]
    assert [dict(g.rewards) for g in grades] == [
        {"act": 1.0, "len": 1.0, "never": None},
        {"act": 10.0, "len": 2.0, "never": None},
        {"act": None, "len": 4.0, "never": None},
    ]
    assert all(g.error is None and g.seconds >= 0 for g in grades)


def test_nothing_applies_is_no_error(pool_of):
    (grade,) = grade_now(pool_of("never"), requests(["1"]))
    assert (grade.reward, grade.error, grade.rewards) == (None, None, {"never": None})


def test_a_sum_that_overflows_is_no_reward(pool_of, code):
    huge = [RewardConfig(function=f"{code}:act", name=n, weight=1e10) for n in "ab"]
    (grade,) = grade_now(pool_of(*huge), requests(["1e300"]))
    assert (grade.reward, grade.error) == (None, "the weighted sum of its rewards is inf")


@pytest.mark.parametrize("workers", [1, 3])
def test_every_response_is_graded_once(pool_of, workers):
    pool = pool_of("act", "length", workers=workers)

    def feed():
        for i in range(500):
            pool.submit(requests([str(i)], first=i))

    grades = asyncio.run(collect(pool, feed, 500))
    assert sorted(g.attempt for g in grades) == list(range(500))
    assert all(g.reward == g.attempt + len(str(g.attempt)) for g in grades)
    assert pool.pending() == {}


def test_many_grades_come_in_few_calls(pool_of):
    pool = pool_of("act")
    calls = []

    async def run() -> None:
        enough = asyncio.Event()

        def on_grades(some):
            calls.append(len(some))
            if sum(calls) == 400:
                enough.set()

        pool.attach(asyncio.get_running_loop(), on_grades)
        pool.submit(requests(["1"] * 400))
        await asyncio.wait_for(enough.wait(), 60)

    asyncio.run(run())
    assert len(calls) <= 40


def test_the_callback_may_submit_again(pool_of):
    pool = pool_of("act")
    seen: list[int] = []

    async def run() -> None:
        done = asyncio.Event()

        def on_grades(some):
            for grade in some:
                seen.append(grade.attempt)
                if grade.attempt < 20:
                    pool.submit(requests(["1"], first=grade.attempt + 1))
                else:
                    done.set()

        pool.attach(asyncio.get_running_loop(), on_grades)
        pool.submit(requests(["1"]))
        await asyncio.wait_for(done.wait(), 60)

    asyncio.run(run())
    assert seen == list(range(21))


def test_group_rewards_see_the_whole_group(pool_of, code):
    pool = pool_of("length", RewardConfig(function=f"{code}:rank", needs_group=True, weight=10))
    assert pool.needs_group
    grades = grade_now(pool, requests(["3", "1", "22", "2"]), group=True)
    assert [g.rewards["rank"] for g in grades] == [0.5, 0.0, 0.75, 0.25]
    assert [g.reward for g in grades] == [6.0, 1.0, 9.5, 3.5]
    with pytest.raises(AssertionError, match="submit whole groups"):
        pool.submit(requests(["1"], first=9))


def test_cancelled_attempts_get_no_grade_and_do_not_hold_others_up(pool_of, code):
    pool = pool_of(RewardConfig(function=f"{code}:act", timeout_s=100))

    async def run():
        grades = []
        got = asyncio.Event()
        pool.attach(asyncio.get_running_loop(), lambda some: (grades.extend(some), got.set()))
        pool.wait_ready()
        pool.submit(requests(["hang", "1", "2"]))
        await asyncio.sleep(0.3)
        pool.submit(requests(["5"], first=10))
        pool.cancel([AttemptId(0), AttemptId(2), AttemptId(77)])
        start = time.monotonic()
        while len(grades) < 2:
            got.clear()
            await asyncio.wait_for(got.wait(), 30)
        return grades, time.monotonic() - start

    grades, seconds = asyncio.run(run())
    assert sorted((g.attempt, g.reward) for g in grades) == [(1, 1.0), (10, 5.0)]
    assert seconds < 15
    assert pool.pending() == {}


def test_slow_calls_delay_nothing_but_themselves(pool_of, code, tmp_path):
    """This one waits for all the others."""
    others = tmp_path / "others"
    code.write_text(
        code.read_text()
        + f"""
def waits(completions, **_):
    while completions[0] == "wait" and not os.path.exists({str(others)!r}):
        time.sleep(0.01)
    return [1.0]
"""
    )
    pool = pool_of(RewardConfig(function=f"{code}:waits", timeout_s=100), workers=2)
    texts = ["1"] * 60
    texts[4] = "wait"

    async def run():
        grades = []
        done = asyncio.Event()

        def on_grades(some):
            grades.extend(some)
            if len(grades) == 59:
                others.touch()
            if len(grades) == 60:
                done.set()

        pool.attach(asyncio.get_running_loop(), on_grades)
        pool.submit(requests(texts))
        await asyncio.wait_for(done.wait(), 100)
        return grades

    assert asyncio.run(run())[-1].attempt == 4


def test_pending_names_what_is_awaited(pool_of, code):
    pool = pool_of(RewardConfig(function=f"{code}:act", timeout_s=100))
    pool.wait_ready()
    start = time.monotonic()
    pool.submit(requests(["hang", "1"]))
    time.sleep(0.1)
    waits = pool.pending()
    assert set(waits) == {0, 1}
    assert all(0.09 < seconds < time.monotonic() - start for seconds in waits.values())


def test_submitting_never_waits_even_for_large_batches(pool_of, code):
    """Nobody reads meanwhile."""
    pool = pool_of(RewardConfig(function=f"{code}:length", timeout_s=100))
    pool.wait_ready()
    (process,) = processes_of(pool)
    os.kill(process, signal.SIGSTOP)
    pool.submit(requests(["x" * 200_000] * 12))
    assert len(pool.pending()) == 12
    os.kill(process, signal.SIGCONT)
    grades = asyncio.run(collect(pool, lambda: None, 12))
    assert [g.reward for g in grades] == [2e5] * 12


def test_a_function_that_does_not_exist_is_one_clear_error(pool_of, code):
    pool = pool_of("nothing")
    with pytest.raises(ValueError, match="has no function 'nothing'"):
        pool.wait_ready()
    (grade,) = grade_now(pool, requests(["1"]))
    assert grade.reward is None
    assert grade.error == (
        f"rewards: '{code}' has no function 'nothing'; it has act, length, never, rank, pid"
    )


def test_columns_that_cannot_be_sent_harm_their_own_row_only(pool_of):
    pool = pool_of("act")
    some = requests(["1"]) + requests(["2"], first=1, bad=lambda: 0) + requests(["3"], first=2)
    grades = grade_now(pool, some)
    assert [g.reward for g in grades] == [1.0, None, 3.0]
    assert grades[1].error is not None
    assert grades[1].error.startswith("its data row cannot be sent: ")


def rg_request(number: int, entry: dict, completion: str) -> GradeRequest:
    row = entry | {"rg_task": "gcd", "rg_options": {}}
    return GradeRequest(
        attempt=AttemptId(number),
        prompt=entry["question"],
        completion=completion,
        completion_ids=[1],
        row=row,
    )


def test_all_kinds_of_rewards_together(code):
    rewards = [
        RewardConfig(function="rg", options={"threshold": 0.99}),
        RewardConfig(function="math"),
        RewardConfig(function=f"{code}:length", weight=0.0),
        RewardConfig(function=f"{code}:rank", needs_group=True),
    ]
    entry = reasoning_gym.create_dataset("gcd", size=1, seed=0)[0]
    pool = GradingPool(rewards, GradingConfig(workers=1))
    try:
        texts = [entry["answer"], "1234567", entry["answer"]]
        some = [rg_request(i, entry, text) for i, text in enumerate(texts)]
        grades = grade_now(pool, some, group=True)
    finally:
        pool.close()
    assert [g.rewards["rg"] for g in grades] == [1.0, 0.0, 1.0]
    assert [g.rewards["math"] for g in grades] == [1.0, 0.0, 1.0]
    assert [g.reward for g in grades] == [2.0, 2 / 3, 2.0]


def test_the_driver_spends_little(pool_of):
    pool = pool_of("length")
    batch = [
        GradeRequest(
            attempt=AttemptId(i),
            prompt="What is the greatest common divisor of 18 and 24?",
            completion="25 50 " * 50,
            completion_ids=list(range(300)),
            row={"answer": "6", "metadata": {"numbers": [18, 24]}, "rg_task": "gcd"},
        )
        for i in range(128)
    ]
    grade_now(pool, batch)
    start = time.process_time()
    for _ in range(10):
        grade_now(pool, batch)
    spent = (time.process_time() - start) / 1280
    assert spent < 300e-6, f"{spent * 1e6:.0f} us a sample; 25 on an idle machine"


def test_with_a_tokenizer_responses_are_decoded_where_they_are_graded(code):
    """Also by the process that is started when one has died; it is more than a socket holds."""
    words = ["kill", *map(str, range(1, 60_000))]
    tokenizer = Tokenizer(WordLevel({word: place for place, word in enumerate(words)}))
    tokenizer.add_special_tokens(["<end>"])
    pool = GradingPool(
        [RewardConfig(function=f"{code}:act")],
        GradingConfig(retries=0),
        read=ResponseText(tokenizer, frozenset([60_000])),
    )
    wanted = [
        GradeRequest(
            attempt=AttemptId(place), prompt="p", completion_ids=array("i", [token, 60_000]), row={}
        )
        for place, token in enumerate((7, 0, 59_999))
    ]
    try:
        grades = asyncio.run(collect(pool, lambda: pool.submit(wanted), 3))
    finally:
        pool.close()
    rewards = {grade.attempt: grade.reward for grade in grades}
    assert rewards == {0: 7.0, 1: None, 2: 59_999.0}
