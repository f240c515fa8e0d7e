"""Rewards with ``batch``: responses that wait share a call, and fail on their own."""

import asyncio
import json
import os
import signal
import time

import pytest
from pool_helpers import collect, processes_of, requests

from grading import grade_now
from rollpacker.config import GradingConfig, RewardConfig
from rollpacker.core.types import AttemptId
from rollpacker.reward.base import Grade, GradeRequest
from rollpacker.reward.processes import pool as pools
from rollpacker.reward.processes.pool import GradingPool
from waiting import soon

CALLS = """

import json

def calls(completions, log, **_):
    with open(log[0], "a") as file:
        file.write(json.dumps(completions) + "\\n")
    if "bad" in completions:
        raise ValueError("one of them is bad")
    for text in completions:
        if text == "hang":
            time.sleep(1000)
        while text == "gate" and not os.path.exists(log[0] + ".open"):
            time.sleep(0.01)
        if text.startswith("sleep "):
            time.sleep(float(text[6:]))
    return [float(text) if text.isdigit() else -1.0 for text in completions]
"""


class Calls:
    """Pools of a function that writes down how it was called."""

    def __init__(self, code, pool_of) -> None:
        code.write_text(code.read_text() + CALLS)
        self.log = code.with_name("calls")
        self.log.write_text("")
        self.function = f"{code}:calls"
        self._pool_of = pool_of

    def pool(
        self, batch: int, *more: RewardConfig | str, timeout_s: float = 1.5, **settings
    ) -> GradingPool:
        reward = RewardConfig(function=self.function, batch=batch, timeout_s=timeout_s)
        pool = self._pool_of(reward, *more, **settings)
        pool.wait_ready()
        return pool

    def requests(self, texts: list[str], first: int = 0, **row) -> list[GradeRequest]:
        return requests(texts, first, log=str(self.log), **row)

    def open_gate(self) -> None:
        self.log.with_name("calls.open").touch()

    def made(self) -> list[list[str]]:
        return [json.loads(line) for line in self.log.read_text().splitlines()]


@pytest.fixture
def calls(code, pool_of) -> Calls:
    return Calls(code, pool_of)


def numbers(count: int) -> list[str]:
    return [str(i) for i in range(count)]


def test_what_waits_shares_calls_as_large_as_possible(calls) -> None:
    grades = grade_now(calls.pool(4), calls.requests(numbers(10)))
    assert [grade.reward for grade in grades] == list(range(10))
    assert calls.made() == [["0", "1", "2", "3"], ["4", "5", "6", "7"], ["8", "9"]]


def test_what_comes_during_a_call_shares_the_next_one(calls) -> None:
    pool = calls.pool(4)

    async def run() -> None:
        grades: list[Grade] = []
        pool.attach(asyncio.get_running_loop(), grades.extend)
        pool.submit(calls.requests(["gate"]))
        for i in range(1, 8):
            await asyncio.sleep(0.01)
            pool.submit(calls.requests([str(i)], first=i))
        calls.open_gate()
        await soon(lambda: len(grades) == 8)

    asyncio.run(run())
    assert calls.made() == [["gate"], ["1", "2", "3", "4"], ["5", "6", "7"]]


def test_only_calls_of_the_same_function_are_joined(calls, code) -> None:
    other = RewardConfig(function=calls.function, name="other", batch=3, domains=["default"])
    pool = calls.pool(2, "length", other)
    grades = grade_now(pool, calls.requests(numbers(4)))
    assert [grade.reward for grade in grades] == [2 * i + 1 for i in range(4)]
    assert sorted(map(len, calls.made())) == [1, 2, 2, 3]


def test_without_batch_each_response_has_its_call(calls) -> None:
    grade_now(calls.pool(1), calls.requests(numbers(5)))
    assert calls.made() == [[text] for text in numbers(5)]


def test_a_pool_that_must_not_join_does_not(calls) -> None:
    reward = RewardConfig(function=calls.function, batch=4)
    pool = GradingPool([reward], GradingConfig(), join=False)
    try:
        grades = grade_now(pool, calls.requests(numbers(5)))
    finally:
        pool.close()
    assert [grade.reward for grade in grades] == list(range(5))
    assert calls.made() == [[text] for text in numbers(5)]


def test_every_idle_process_takes_a_whole_call(calls, code) -> None:
    code.write_text(
        code.read_text() + "\ndef who(completions, **_):\n    time.sleep(0.5)\n"
        "    return [1000.0 * os.getpid() + len(completions)] * len(completions)\n"
    )
    pool = calls.pool(1, RewardConfig(function=f"{code}:who", batch=4), workers=2)
    seen = [grade.rewards["who"] for grade in grade_now(pool, calls.requests(numbers(8)))]
    assert {score % 1000 for score in seen} == {4.0}
    assert len(set(seen)) == 2


@pytest.mark.parametrize("retries", [0, 1])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_call_that_fails_is_tried_one_by_one(calls, retries, workers) -> None:
    pool = calls.pool(6, retries=retries, workers=workers)
    texts = ["0", "1", "bad", "3", "4", "5"]
    grades = grade_now(pool, calls.requests(texts))
    assert [grade.reward for grade in grades] == [0.0, 1.0, None, 3.0, 4.0, 5.0]
    assert (grades[2].error or "").endswith(" in calls: ValueError: one of them is bad")
    assert calls.made()[0] == texts
    assert sorted(calls.made()[1:]) == sorted([text] for text in texts)
    (said,) = pool.said()
    assert said.endswith(
        " in calls: ValueError: one of them is bad: "
        "the responses of this call are graded again one by one"
    )


def test_each_response_is_charged_once_for_a_shared_call(calls) -> None:
    grades = grade_now(calls.pool(3, retries=2), calls.requests(["bad", "1", "bad"]))
    assert [grade.reward for grade in grades] == [None, 1.0, None]
    assert sorted(calls.made()[1:]) == [["1"]] + [["bad"]] * 4


def test_an_endless_call_is_killed_after_its_timeout_and_the_others_are_graded(calls) -> None:
    pool = calls.pool(4, retries=1, timeout_s=0.5)
    texts = ["0", "hang", *numbers(8)[2:]]
    began = time.monotonic()
    grades = grade_now(pool, calls.requests(texts))
    assert time.monotonic() - began > 1.0  # once with others, once alone
    assert [grade.reward for grade in grades] == [0.0, None, *range(2, 8)]
    assert grades[1].error == "reward 'calls': timed out after 0.5 s"
    assert calls.made()[:2] == [texts[:4], texts[4:]]
    assert sorted(calls.made()[2:]) == sorted([text] for text in texts[:4])


def test_a_shared_call_in_time_is_not_killed_by_those_before_it(calls) -> None:
    """The timeout is for one call, however many wait."""
    texts = ["sleep 0.15"] * 8
    grades = grade_now(calls.pool(2, retries=0, timeout_s=1.0), calls.requests(texts))
    assert [grade.reward for grade in grades] == [-1.0] * 8
    assert calls.made() == [texts[:2]] * 4


def test_cancelled_responses_are_left_out(calls) -> None:
    pool = calls.pool(8)

    async def run() -> list[Grade]:
        grades: list[Grade] = []
        pool.attach(asyncio.get_running_loop(), grades.extend)
        pool.submit(calls.requests(["gate"]))
        await soon(lambda: len(calls.made()) == 1)
        pool.submit(calls.requests(numbers(6), first=1))
        pool.cancel([AttemptId(1), AttemptId(4)])
        calls.open_gate()
        await soon(lambda: len(grades) == 5)
        return grades

    grades = asyncio.run(run())
    assert sorted(grade.attempt for grade in grades) == [0, 2, 3, 5, 6]
    assert calls.made() == [["gate"], ["1", "2", "4", "5"]]
    assert pool.pending() == {}


def test_those_cancelled_in_a_call_that_fails_are_not_tried_again(calls) -> None:
    pool = calls.pool(4, retries=0, timeout_s=0.5)

    async def run() -> list[Grade]:
        grades: list[Grade] = []
        pool.attach(asyncio.get_running_loop(), grades.extend)
        pool.submit(calls.requests(["hang", "1", "2", "3"]))
        await soon(lambda: len(calls.made()) == 1)
        pool.cancel([AttemptId(0), AttemptId(2)])
        await soon(lambda: len(grades) == 2)
        return grades

    assert sorted((g.attempt, g.reward) for g in asyncio.run(run())) == [(1, 1.0), (3, 3.0)]
    assert sorted(calls.made()[1:]) == [["1"], ["3"]]


def test_a_row_that_cannot_be_sent_harms_itself_only(calls) -> None:
    some = calls.requests(["0", "1"]) + calls.requests(["2"], first=2, strange=lambda: 0)
    grades = grade_now(calls.pool(4, retries=0), [*some, *calls.requests(["3"], first=3)])
    assert [grade.reward for grade in grades] == [0.0, 1.0, None, 3.0]
    assert (grades[2].error or "").startswith("its data row cannot be sent: ")


def test_kill_9_during_shared_calls_loses_nothing(calls) -> None:
    pool = calls.pool(4, workers=2, retries=4)

    async def run() -> list[Grade]:
        grades: list[Grade] = []
        pool.attach(asyncio.get_running_loop(), grades.extend)
        for i in range(40):
            pool.submit(calls.requests(["sleep 0.03"], first=i))
        for _ in range(3):
            await asyncio.sleep(0.3)
            os.kill(processes_of(pool)[0], signal.SIGKILL)
        await soon(lambda: len(grades) == 40)
        return grades

    grades = asyncio.run(run())
    assert sorted(grade.attempt for grade in grades) == list(range(40))
    assert all(grade.reward == -1.0 for grade in grades)


def test_an_event_loop_joins_a_stream_of_responses(calls, monkeypatch) -> None:
    """Without the check for hangs, which finds replies too, but late."""
    monkeypatch.setattr(pools, "CHECK_S", 1000.0)
    pool = calls.pool(16, timeout_s=1000.0)

    def feed() -> None:
        for i in range(400):
            pool.submit(calls.requests([str(i)], first=i))

    grades = asyncio.run(asyncio.wait_for(collect(pool, feed, 400), 60))
    assert [grade.reward for grade in sorted(grades, key=lambda g: g.attempt)] == list(range(400))
    assert len(calls.made()) <= 27  # the first one may be alone
