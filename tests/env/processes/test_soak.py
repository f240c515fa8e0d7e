"""A thousand episodes, of which many do the worst that they can."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest
from pool_driving import PATIENCE_S, Driver, opened

from rollpacker.env.messages import EnvironmentAnswer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
EPISODES, AT_ONCE, PROCESSES = 1000, 16, 2
TIMEOUT_S = 5.0
SPARE = 128 << 20
"""Bytes by which a process may be larger at the end."""

ENDS: Mapping[str, tuple[int, str]] = {
    "end": (500, ""),
    "leak": (100, ""),
    "long": (100, ""),
    "raise": (100, "KeyError: 'board'"),
    "odd message": (100, "a message that cannot be passed on"),
    "hang": (20, "timed out after 5 s"),
    "hang in a thread": (10, "timed out after 5 s"),
    "exit": (10, "exited with code 3"),
    "fork and exit": (5, "exited with code 3"),
    "kill": (10, "was killed by signal 9"),
    "nonsense": (10, "wrote nonsense"),
    "flood": (5, "wrote more than 64 MiB at once"),
    "block": (5, "hung for 7 s"),
}
"""How often an episode ends in which way, and what is said of it."""


async def episode(driver: Driver, key: int, what: str, turns: int) -> tuple[EnvironmentAnswer, int]:
    """From its beginning to an end of its own: its last answer, and how often it was begun."""
    for times in range(1, 100):
        number = driver.begin(key)
        reply = await driver.answer(number)
        for turn in range(turns):
            if reply.answer.error:
                break
            reply = await driver.told(number, what if turn == turns - 1 else "go on")
        if not reply.answer.error and not reply.answer.over:
            reply = await driver.told(number, "end")
        assert driver.silent(number)
        if not reply.blameless:
            return reply.answer, times
    raise AssertionError(f"{what} is never charged")


async def soak(driver: Driver, seed: int) -> Counter[str]:
    """All of them; returns how often each kind was begun again."""
    rng = random.Random(seed)
    kinds = rng.choices(list(ENDS), [often for often, _ in ENDS.values()], k=EPISODES)
    free = asyncio.Semaphore(AT_ONCE)
    again: Counter[str] = Counter()

    async def one(key: int, what: str, turns: int) -> None:
        async with free:
            answer, times = await episode(driver, key, what, turns)
        again[what] += times - 1
        said = ENDS[what][1]
        assert said in answer.error, what
        assert bool(said) == bool(answer.error), (what, answer.error)
        assert bool(answer.over) != bool(said), what

    await asyncio.gather(*(one(n, what, rng.randint(1, 3)) for n, what in enumerate(kinds, 1)))
    return again


def sizes(driver: Driver) -> list[int]:
    """Of the driver and of each process, bytes."""
    pids = [psutil.Process().pid, *driver.processes()]
    return [psutil.Process(pid).memory_info().rss for pid in pids]


@pytest.mark.parametrize("seed", [0])
def test_each_is_answered_once_and_nothing_is_left(tmp_path: Path, seed: int) -> None:
    async def whole() -> None:
        async with opened(tmp_path, processes=PROCESSES, step_timeout_s=TIMEOUT_S) as driver:
            before = sizes(driver)
            again = await soak(driver, seed)
            await asyncio.wait_for(settled(driver), PATIENCE_S)
            after = sizes(driver)
        assert again.total() > 0
        assert after[0] < before[0] + SPARE
        assert max(after[1:]) < max(before[1:]) + SPARE

    asyncio.run(whole())
    leaked = [int(path.name.partition("-")[2]) for path in tmp_path.glob("leaked-*")]
    assert leaked
    assert not [pid for pid in leaked if sleeps(pid)]


async def settled(driver: Driver) -> None:
    """Until there are no more processes than were asked for."""
    while len(driver.processes()) > PROCESSES:
        await asyncio.sleep(0.01)


def sleeps(pid: int) -> bool:
    """Whether it is still what an environment has left behind."""
    try:
        return psutil.Process(pid).name() == "sleep"
    except psutil.NoSuchProcess:
        return False
