import asyncio
import os
import pickle
import signal
import subprocess
import sys
import textwrap

import pytest
from pool_helpers import CODE, collect, processes_of, requests

from case_files import read_table
from grading import grade_now
from rollpacker.config import GradingConfig, RewardConfig
from rollpacker.processes.frames import WireError
from rollpacker.reward.processes.ledger import read_reply
from rollpacker.reward.processes.pool import GradingPool
from rollpacker.reward.processes.process import GradingJob, start
from waiting import alive, until

TIMEOUT_S = 0.5
FAULTS = read_table(__file__, "FAULTS")


@pytest.fixture(scope="module")
def acts(tmp_path_factory):
    """A pool that goes from one fault to the next."""
    path = tmp_path_factory.mktemp("faults") / "acts.py"
    path.write_text(CODE)
    reward = RewardConfig(function=f"{path}:act", timeout_s=TIMEOUT_S)
    pool = GradingPool([reward], GradingConfig(retries=0))
    yield pool
    pool.close()


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_harms_its_own_sample_only(acts, fault):
    acts.wait_ready()
    grades = grade_now(acts, requests(["1", "2", fault, "4", "5", "6"]))
    assert [g.reward for g in grades] == [1.0, 2.0, None, 4.0, 5.0, 6.0]
    assert FAULTS[fault] in (grades[2].error or "")
    assert "\n" not in (grades[2].error or "")
    assert all(g.error is None for g in grades if g.attempt != 2)


def test_a_mixture_of_faults_in_an_event_loop(pool_of, code):
    act = RewardConfig(function=f"{code}:act", timeout_s=TIMEOUT_S)
    pool = pool_of(act, workers=2, retries=1)
    texts = ["1"] * 30
    bad = {3: "raise", 7: "kill", 8: "crash", 13: "hang", 20: "text", 29: "exit"}
    for place, fault in bad.items():
        texts[place] = fault
    grades = asyncio.run(collect(pool, lambda: pool.submit(requests(texts)), 30))
    assert sorted(g.attempt for g in grades) == list(range(30))
    assert {g.attempt for g in grades if g.reward is None} == set(bad)
    assert pool.pending() == {}


def test_a_failed_call_is_repeated(pool_of, tmp_path):
    marker = str(tmp_path / "marker")
    once = requests(["once"], marker=marker)
    pool = pool_of("act", retries=1)
    (grade,) = grade_now(pool, once)
    assert grade.reward is None
    assert grade.error is not None
    assert "could not convert" in grade.error
    assert os.path.exists(marker)


def test_only_the_failed_function_is_repeated(pool_of, tmp_path, code):
    log = tmp_path / "log"
    extra = f"""
def counted(completions, **_):
    with open({str(log)!r}, "a") as file:
        file.write("x")
    return [1.0]
"""
    code.write_text(code.read_text() + extra)
    (grade,) = grade_now(pool_of("counted", "act", retries=2), requests(["crash"]))
    assert grade.reward is None
    assert log.read_text() == "x"


def test_kill_9_at_any_time_loses_nothing(pool_of):
    pool = pool_of("act", workers=2, retries=4)
    pool.wait_ready()

    async def run():
        grades = []
        pool.attach(asyncio.get_running_loop(), grades.extend)
        for i in range(120):
            pool.submit(requests(["sleep 0.02"], first=i))
        for _ in range(4):
            await asyncio.sleep(0.3)
            os.kill(processes_of(pool)[0], signal.SIGKILL)
        while len(grades) < 120:
            await asyncio.sleep(0.02)
        return grades

    grades = asyncio.run(asyncio.wait_for(run(), 60))
    assert sorted(g.attempt for g in grades) == list(range(120))
    assert all(g.reward == 1.0 for g in grades)


def test_a_stopped_process_is_replaced(pool_of, code):
    pool = pool_of(RewardConfig(function=f"{code}:act", timeout_s=TIMEOUT_S), retries=1)
    (process,) = grade_now(pool, requests(["1"])) and processes_of(pool)
    os.kill(process, signal.SIGSTOP)
    assert grade_now(pool, requests(["3"]))[0].reward == 3.0


def test_group_faults_harm_the_group_only(pool_of, code):
    extra = "def picky(completions, **_):\n    return [1 / (c != '0') for c in completions]\n"
    code.write_text(code.read_text() + extra)
    pool = pool_of("length", RewardConfig(function=f"{code}:picky", needs_group=True))
    bad = grade_now(pool, requests(["1", "0", "2"]), group=True)
    good = grade_now(pool, requests(["1", "3"], first=10), group=True)
    assert [g.reward for g in bad] == [None] * 3
    assert [g.reward for g in good] == [2.0, 2.0]


def test_processes_die_with_their_driver(code):
    script = f"""
        import os, time
        from rollpacker.config import GradingConfig, RewardConfig
        from rollpacker.core.types import AttemptId
        from rollpacker.reward.base import GradeRequest
        from rollpacker.reward.processes.pool import GradingPool

        pool = GradingPool([RewardConfig(function={f"{code}:act"!r})], GradingConfig())
        pool.wait_ready()
        pool.submit([GradeRequest(attempt=AttemptId(0), prompt="p", completion="spin",
                                  completion_ids=[], row={{}})])
        print(pool._members[0].popen.pid, flush=True)
        time.sleep(0.2)
        os.kill(os.getpid(), 9)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True
    )
    pid = int(done.stdout)
    until(lambda: not alive(pid))


def test_what_a_reward_started_dies_with_it(pool_of, code, tmp_path):
    note = tmp_path / "pid"
    code.write_text(
        code.read_text()
        + f"""
def start(completions, **_):
    import subprocess
    child = subprocess.Popen(["sleep", "1000"])
    with open({str(note)!r}, "w") as file:
        file.write(str(child.pid))
    time.sleep(1000)
"""
    )
    start = RewardConfig(function=f"{code}:start", timeout_s=TIMEOUT_S)
    (grade,) = grade_now(pool_of(start, retries=0), requests(["1"]))
    assert grade.error == "reward 'start': timed out after 0.5 s"
    until(lambda: not alive(int(note.read_text())))


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"{",
        b"[" * 100_000,
        b"3",
        b'{"job":8,"f":1,"s":0.1,"scores":[1.0]}',
        b'{"job":7,"f":0,"s":0.1,"scores":[1.0]}',
        b'{"job":7,"f":1,"s":0.1,"scores":[1.0,1.0]}',
        b'{"job":7,"f":1,"s":0.1,"scores":[NaN]}',
        b'{"job":7,"f":1,"s":0.1,"scores":[Infinity]}',
        b'{"job":7,"f":1,"s":0.1,"scores":["1.0"]}',
        b'{"job":7,"f":1,"s":0.1,"scores":[true]}',
        b'{"job":7,"f":1,"s":1e999,"scores":[1.0]}',
        b'{"job":7,"f":1,"scores":[1.0]}',
        b'{"job":7,"f":1,"s":0.1}',
        b'{"job":7,"f":1,"s":-1.0,"scores":[1.0]}',
    ],
)
def test_forged_replies_are_refused(payload):
    job = GradingJob(7, tuple(requests(["1"])), [1])
    assert read_reply(b'{"job":7,"f":1,"s":0.1,"scores":[1.0]}', job).scores == (1.0,)
    with pytest.raises(WireError):
        read_reply(payload, job)


def test_a_process_whose_driver_has_gone_says_nothing(capfd):
    process = start([], pickle.dumps(None), checked=True)
    process.channel.close()
    assert process.popen.wait(timeout=60) == 0
    assert not capfd.readouterr().err
