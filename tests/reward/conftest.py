from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rollpacker.config import GradingConfig, RewardConfig
from rollpacker.reward.processes.pool import GradingPool

CODE = """
import os, signal, time

def act(completions, **columns):
    text = completions[0]
    if text == "raise":
        raise KeyError("no\\nsuch key")
    if text == "hang":
        time.sleep(1000)
    if text == "spin":
        while True:
            pass
    if text == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if text == "exit":
        raise SystemExit(3)
    if text == "crash":
        os._exit(7)
    if text == "text":
        return ["much"]
    if text == "many":
        return [1.0, 1.0]
    if text == "forge":
        for number in range(3, 200):
            try:
                os.write(number, b'\\x02\\x00\\x00\\x00{}' * 8)
            except OSError:
                pass
    if text == "flood":
        for number in range(3, 200):
            try:
                os.write(number, b'\\xff' * 4096)
            except OSError:
                pass
    if text == "once" and not os.path.exists(columns["marker"][0]):
        open(columns["marker"][0], "w").close()
        os._exit(1)
    if text.startswith("sleep "):
        time.sleep(float(text[6:]))
        return [1.0]
    if text == "none":
        return [None]
    return [float(text)]

def length(completions, **_):
    return [float(len(c)) for c in completions]

def never(completions, **_):
    return [None] * len(completions)

def rank(completions, **_):
    order = sorted(float(c) for c in completions)
    return [order.index(float(c)) / len(completions) for c in completions]

def pid(completions, **_):
    return [float(os.getpid()) for _ in completions]
"""


@pytest.fixture
def code(tmp_path) -> Path:
    path = tmp_path / "acts.py"
    path.write_text(CODE)
    return path


@pytest.fixture
def pool_of(code) -> Iterator[Callable[..., GradingPool]]:
    """``pool_of("act", "length", retries=0)``: a pool of functions of the file above."""
    pools: list[GradingPool] = []

    def build(*names: str | RewardConfig, **settings) -> GradingPool:
        rewards = [
            RewardConfig(function=f"{code}:{n}", timeout_s=1.0) if isinstance(n, str) else n
            for n in names
        ]
        pool = GradingPool(rewards, GradingConfig(**settings))
        pools.append(pool)
        return pool

    yield build
    for pool in pools:
        pool.close()
