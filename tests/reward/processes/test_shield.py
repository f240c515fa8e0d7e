"""Signals from outside, as Slurm sends them to every process, end no child of a driver."""

import os
import signal
from pathlib import Path

import pytest
from pool_helpers import requests

from grading import grade_now
from rollpacker.config import GradingConfig, RewardConfig
from rollpacker.processes.children import OUTSIDE, shielded
from rollpacker.reward.processes.pool import GradingPool
from rollpacker.sandbox.running import Zygote

REWARD = """
import multiprocessing, os, signal, subprocess, time

def hit(completions, **_):
    for number in (2, 15, 1, 10, 12):
        os.kill(os.getpid(), number)
    return [1.0 for _ in completions]

def helper(completions, **_):
    child = subprocess.Popen(["sleep", "600"])
    child.terminate()
    forked = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
    forked.start()
    forked.terminate()
    forked.join()
    return [float(child.wait() == forked.exitcode == -signal.SIGTERM) for _ in completions]
"""


@pytest.mark.parametrize("name", ["hit", "helper"])
def test_a_grading_process_takes_no_notice_and_its_helpers_can_be_ended(
    tmp_path: Path, name: str
) -> None:
    code = tmp_path / "judges.py"
    code.write_text(REWARD, encoding="utf-8")
    pool = GradingPool(
        [RewardConfig(function=f"{code}:{name}", timeout_s=100)], GradingConfig(workers=1)
    )
    try:
        pool.wait_ready()
        assert [grade.reward for grade in grade_now(pool, requests(["a", "b"]))] == [1.0, 1.0]
        assert pool.said() == []
    finally:
        pool.close()


def test_a_zygote_and_its_programs_take_none() -> None:
    zygote = Zygote("basic")
    try:
        status = Path(f"/proc/{zygote._popen.pid}/status").read_text(encoding="ascii")
        blocked = int(status.partition("SigBlk:")[2].split()[0], 16)
        assert all(blocked >> (number - 1) & 1 for number in OUTSIDE)
    finally:
        zygote.close()


def test_the_driver_gets_what_came_while_it_started_a_child() -> None:
    got: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _frame: got.append(number))
    try:
        with shielded():
            os.kill(os.getpid(), signal.SIGUSR1)
        assert got == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)
