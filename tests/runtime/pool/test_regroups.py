"""Engines put together and taken apart again and again in one pool: nothing grows."""

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from pool_jobs import CPU, VLLM, Heard, decode, pool_of, requests
from runtime_jobs import Workshop, write_wide_model

from rollpacker.core.types import EngineId
from rollpacker.engine.base import Request
from rollpacker.runtime.messages import messages as msg
from rollpacker.runtime.step.publishing import Publishing

pytestmark = [pytest.mark.cluster, pytest.mark.alone, pytest.mark.slow, pytest.mark.timeout(900)]

WARM_UP, REGROUPS = 6, 26
ONE, OTHER = EngineId(0), EngineId(1)
GROWTH_MB = 4.0
"""Of a process in twenty regroups."""
TWO: dict[str, Any] = {"devices": CPU | {"per_node": 2}, "trainer": {"kind": "fsdp", "shard": 2}}

Size = tuple[float, float, int, int]
"""PSS and RSS in MB, descriptors, threads."""


def sizes(heard: Heard) -> list[Size]:
    """Of the driver and each worker."""
    found: list[Size] = []
    for process in (psutil.Process(), *map(psutil.Process, heard.pids)):
        memory = process.memory_full_info()
        found.append((memory.pss / 1e6, memory.rss / 1e6, process.num_fds(), process.num_threads()))
    return found


async def published(heard: Heard, version: int) -> None:
    """Disbands what is formed, and gives all engines the weights again."""
    done: list[bool] = []
    publishing = Publishing(heard.pool, version, lambda: done.append(True))
    place = len(heard.said)
    while not done:
        await heard.until(partial(more, heard, place))
        who, report = heard.said[place]
        place += 1
        if isinstance(report, msg.Slept):
            publishing.slept(EngineId(who), report.size)
        elif isinstance(report, msg.Shared):
            publishing.shared(report)
        elif isinstance(report, msg.WeightsLoaded):
            publishing.loaded(EngineId(who))


def more(heard: Heard, than: int) -> bool:
    return len(heard.said) > than


async def regroup(heard: Heard, number: int, asked: list[Request]) -> None:
    """Decode apart, together, and apart again with new weights."""
    half = len(asked) // 2
    decode(heard, ONE, asked[: half // 2])
    decode(heard, OTHER, asked[half // 2 : half])
    await heard.until(lambda: len(heard.outputs) == half)
    heard.pool.form(ONE, (ONE, OTHER))
    decode(heard, ONE, asked[half:])
    await heard.until(lambda: len(heard.outputs) == len(asked))
    await published(heard, number + 1)


async def tokens(heard: Heard, engine: int, asked: list[Request]) -> dict[int, list[int]]:
    decode(heard, engine, asked)
    await heard.until(lambda: len(heard.outputs) == len(asked))
    return {n: output.tokens.tolist() for n, output in heard.outputs.items()}


def test_twenty_regroups_leave_every_process_as_it_was(tmp_path: Path) -> None:
    shop = Workshop(tmp_path)
    shop.model = write_wide_model(tmp_path / "wide")
    asked = requests(16, 40)
    history: list[list[Size]] = []

    async def main() -> None:
        async with pool_of(shop, devices=CPU | {"per_node": 1}) as heard:
            expected = await tokens(heard, 0, asked)
        async with pool_of(shop, (1, 2), engine=VLLM, **TWO) as heard:
            for number in range(REGROUPS):
                heard.said.clear()
                heard.outputs.clear()
                await regroup(heard, number, asked)
                assert {n: o.tokens.tolist() for n, o in heard.outputs.items()} == expected
                assert {o.weights_version for o in heard.outputs.values()} == {number}
                history.append(sizes(heard))
            assert not heard.losses

    asyncio.run(main())
    grown = growth(np.array(history[WARM_UP:]))
    assert (grown[:, :2] < GROWTH_MB).all(), grown
    assert (grown[:, 2:] < 1).all(), grown


def growth(history: np.ndarray) -> np.ndarray:
    """By process and measure, shape (P, 4): of a line through all, from its start to its end."""
    times = np.arange(len(history)) - (len(history) - 1) / 2
    slopes = np.tensordot(times, history, 1) / (times @ times)
    return slopes * (len(history) - 1)
