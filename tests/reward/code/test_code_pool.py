"""Programs in the pool of grading processes: slow ones, cancelled ones, dying sandboxes."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Iterator

import pytest
from pool_helpers import processes_of
from program_jobs import LOOP, RIGHT, WRONG, fenced, seconds_old

from grading import grade_now
from rollpacker.config import GradingConfig, RewardConfig
from rollpacker.core.types import AttemptId
from rollpacker.processes.frames import WireError
from rollpacker.reward.base import Grade, GradeRequest
from rollpacker.reward.processes.ledger import read_reply
from rollpacker.reward.processes.pool import GradingPool
from rollpacker.reward.processes.process import GradingJob
from waiting import children, soon, until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the code sandbox needs Linux")

TESTS = [{"stdin": "1 2\n", "stdout": "3\n"}, {"stdin": "0 1\n", "stdout": "1\n"}]
CODE = RewardConfig(function="code", timeout_s=3.0)

LATE = """
from pathlib import Path
children = [p.read_text().split() for p in Path("/proc/self/task").glob("*/children")]
FOUND = len(sum(children, []))

def found(completions, **_):
    return [float(FOUND)]

def length(completions, **_):
    return [float(len(c)) for c in completions]
"""


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GradingPool]:
    """One process with a module that looks, as it is loaded, for what was started before."""
    late = tmp_path_factory.mktemp("late") / "late.py"
    late.write_text(LATE)
    made = GradingPool(
        [
            RewardConfig(function=f"{late}:found", domains=["late"]),
            RewardConfig(function="code", timeout_s=3.0, domains=["code", "late"]),
            RewardConfig(function=f"{late}:length", domains=["text", "code"]),
        ],
        GradingConfig(),
    )
    yield made
    made.close()


def programs(
    *texts: str, first: int = 0, timeout: float = 30.0, domain: str = "default", **row
) -> list[GradeRequest]:
    return [
        GradeRequest(
            attempt=AttemptId(first + i),
            prompt="p",
            completion=fenced(text),
            completion_ids=[1],
            row={"tests": TESTS} | row,
            timeouts_s=(timeout,) * len(TESTS),
            domain=domain,
        )
        for i, text in enumerate(texts)
    ]


def zygotes(pool: GradingPool) -> list[int]:
    return [pid for process in processes_of(pool) for pid in children(process)]


def test_grades_tell_what_became_of_the_program(pool) -> None:
    right, wrong = grade_now(pool, programs(RIGHT, WRONG, domain="code"))
    assert (right.rewards["code"], wrong.rewards["code"]) == (1.0, 0.0)
    assert right.runs["code"].tests == ("pass", "pass")
    assert all(0.0 < seconds < 1.0 for seconds in right.runs["code"].cpu_s)
    assert wrong.runs["code"].verdict == "fail"
    assert set(right.runs) == {"code"}
    assert pool.said() == []


def test_a_program_may_take_longer_than_a_silent_process(pool_of) -> None:
    """Its process gives signs of life: only its own timeout ends it."""
    pool = pool_of(RewardConfig(function="code", timeout_s=0.75), retries=0)
    pool.wait_ready()
    began = time.monotonic()
    (grade,) = grade_now(pool, programs(LOOP, timeout=1.0))
    assert time.monotonic() - began > 1.0
    assert grade.error is None
    assert grade.runs["code"].verdict == "tle_cpu"


def test_a_cancelled_program_is_stopped_and_its_process_lives_on(pool_of) -> None:
    pool = pool_of(CODE)
    pool.wait_ready()
    processes, first_zygotes = processes_of(pool), zygotes(pool)

    async def run() -> list[Grade]:
        grades: list[Grade] = []
        pool.attach(asyncio.get_running_loop(), grades.extend)
        pool.submit(programs(LOOP))
        await soon(lambda: bool(children(first_zygotes[0])))
        pool.cancel([AttemptId(0)])
        pool.submit(programs(RIGHT, first=1))
        began = time.monotonic()
        await soon(lambda: bool(grades))
        assert time.monotonic() - began < 10.0
        return grades

    (grade,) = asyncio.run(run())
    assert (grade.attempt, grade.reward) == (1, 1.0)
    assert (processes_of(pool), zygotes(pool)) == (processes, first_zygotes)
    assert pool.said() == []


def test_killed_and_stopped_zygotes_are_replaced(pool_of) -> None:
    pool = pool_of(RewardConfig(function="code", timeout_s=1.5), retries=3)
    pool.wait_ready()
    (zygote,) = zygotes(pool)
    os.kill(zygote, signal.SIGKILL)
    (grade,) = grade_now(pool, programs(RIGHT))
    assert grade.reward == 1.0
    assert pool.said() == ["a sandbox fork server died and was replaced"]
    (zygote,) = zygotes(pool)
    os.kill(zygote, signal.SIGSTOP)
    (grade,) = grade_now(pool, programs(RIGHT))
    assert grade.reward == 1.0
    assert pool.said() == ["reward 'code': timed out after 1.5 s: it is called again"]


def test_what_fails_in_one_process_is_tried_in_another(pool_of, code) -> None:
    code.write_text(
        code.read_text() + "\ndef picky(completions, tests, **_):\n"
        "    mine = __import__('pathlib').Path(tests[0])\n"
        "    mine.write_text(mine.read_text() + f'{os.getpid()} ')\n"
        "    raise ValueError('not here')\n"
    )
    log = code.with_name("log")
    log.write_text("")
    pool = pool_of("picky", workers=2, retries=1)
    pool.wait_ready()
    (grade,) = grade_now(pool, programs(RIGHT, tests=str(log)))
    assert grade.error is not None
    assert grade.error.startswith("reward 'picky': ")
    assert grade.error.endswith("in picky: ValueError: not here")
    assert len(set(log.read_text().split())) == 2


def test_domains_choose_rewards(pool) -> None:
    code, text, neither = grade_now(
        pool,
        [programs(RIGHT, first=i, domain=of)[0] for i, of in enumerate(("code", "text", "art"))],
    )
    assert set(code.rewards) == {"found", "code", "length"}
    assert code.rewards["found"] is None
    assert code.rewards["code"] == 1.0
    assert text.rewards["code"] is None
    assert text.rewards["length"] is not None
    assert (neither.reward, neither.error) == (None, None)


def test_sandboxes_come_before_what_the_user_imports(pool) -> None:
    """The user's module saw the zygote: it was made before."""
    (grade,) = grade_now(pool, programs(RIGHT, domain="late"))
    assert (grade.rewards["found"], grade.rewards["code"]) == (1.0, 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["zygotes", "processes"])
def test_kill_9_every_second_invents_no_score(pool_of, victim: str) -> None:
    pool = pool_of(CODE, workers=2, retries=6)
    pool.wait_ready()
    slow = "sum(range(3_000_000))\n"

    async def run() -> tuple[list[Grade], int]:
        grades: list[Grade] = []
        pool.attach(asyncio.get_running_loop(), grades.extend)
        pool.submit(programs(*[slow + RIGHT, slow + WRONG] * 50))
        kills, last = 0, time.monotonic()
        while len(grades) < 100:
            await asyncio.sleep(0.02)
            found = zygotes(pool) if victim == "zygotes" else processes_of(pool)
            grown = [pid for pid in found if seconds_old(pid) > 4.0]
            if grown and time.monotonic() - last > 1.0:
                kills, last = kills + 1, time.monotonic()
                os.kill(grown[0], signal.SIGKILL)
        return grades, kills

    grades, kills = asyncio.run(asyncio.wait_for(run(), 240))
    assert kills >= 3
    assert sorted(grade.attempt for grade in grades) == list(range(100))
    for grade in grades:
        assert grade.error is None
        assert grade.reward == float(grade.attempt % 2 == 0)
    assert pool.said()


RUN = (
    '{"verdict":"pass","tests":["pass"],"cpu_s":[0.1],"timeout_s":1.0,"level":"basic",'
    '"forgeable":false}'
)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"pass"]', "3]"),
        ("[0.1]", "[]"),
        ("[0.1]", '["x"]'),
        ('"timeout_s":1.0', '"timeout_s":null'),
        ("false", "0"),
        ('"basic"', "null"),
        ('"level"', '"lewel"'),
        (RUN, f"{RUN},{RUN}"),
        (RUN, "null"),
    ],
)
def test_forged_runs_are_refused(old: str, new: str) -> None:
    job = GradingJob(7, tuple(programs(RIGHT)), [1])
    good = f'{{"job":7,"f":1,"s":0.1,"scores":[1.0],"runs":[{RUN}]}}'
    assert read_reply(good.encode(), job).runs[0].level == "basic"
    with pytest.raises(WireError):
        read_reply(good.replace(old, new, 1).encode(), job)


def test_a_beat_is_of_the_running_job_only() -> None:
    job = GradingJob(7, tuple(programs(RIGHT)), [1])
    assert read_reply(b'{"beat":7}', job).beat
    assert not read_reply(b'{"beat":6}', job).beat
    assert not read_reply(b'{"beat":7}', None).beat


def test_zygotes_end_with_their_process(pool_of) -> None:
    pool: GradingPool = pool_of(CODE)
    pool.wait_ready()
    found = zygotes(pool)
    assert len(found) == 1
    pool.close()
    until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in found))
