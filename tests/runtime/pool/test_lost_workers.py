"""Workers of engines and replicas of their own that end or freeze: who goes with them."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pool_jobs import CPU, VLLM, Heard, decode, pool_of, requests
from runtime_jobs import Workshop, write_wide_model

from rollpacker.core.types import AttemptId, EngineId, Group, GroupPart, PromptId, ReplicaId, Sample
from rollpacker.runtime.messages import messages as msg
from rollpacker.runtime.messages.faults import WorkerError
from rollpacker.runtime.pool.pool import Loss, WorkerPool
from waiting import in_loop, soon

KILL, STOP = signal.SIGKILL, signal.SIGSTOP
LONG = requests(4, 150, forced=True)
SEPARATE: dict[str, Any] = {"devices": CPU | {"per_node": 6, "layout": "separate", "training": 2}}
FOUR: dict[str, Any] = {"devices": CPU | {"per_node": 4}, "trainer": {"kind": "fsdp", "shard": 2}}
shop = Workshop.fixture()


def told(loss: Loss) -> tuple[tuple[int, ...], tuple[int, ...]]:
    assert len(loss.text.splitlines()) == 1, loss.text
    return loss.engines, loss.replicas


async def in_flight(heard: Heard, engine: int) -> None:
    """It decodes ``LONG``: what is far shorter and came with it has ended."""
    (short,) = requests(1, 2, forced=True, first=50)
    decode(heard, engine, [*LONG, short])
    await heard.until(lambda: 50 in heard.outputs)


async def goes_on(heard: Heard, engine: int, first: int) -> None:
    """It decodes."""
    decode(heard, engine, requests(4, 20, forced=True, first=first))
    await heard.until(lambda: all(n in heard.outputs for n in range(first, first + 4)))


@pytest.mark.wide
@in_loop
async def test_engines_and_replicas_of_their_own_are_lost_alone(shop: Workshop) -> None:
    async with pool_of(shop, **SEPARATE) as heard:
        assert told(await heard.lose(0, KILL)) == ((0,), ())
        decode(heard, 2, LONG)
        for worker in (1, 2, 4):
            os.kill(heard.pids[worker], STOP)
        await heard.until(lambda: len(heard.losses) == 4)
        frozen = sorted(map(told, heard.losses[1:]))
        assert frozen == [((), (0,)), ((1,), ()), ((2,), ())]
        await goes_on(heard, 3, 100)
        assert heard.pool.replicas == (1,)
        decode(heard, 3, LONG)
        assert told(await heard.lose(3, KILL)) == ((3,), ())
        assert told(await heard.lose(5, KILL)) == ((), (1,))
        assert [loss.text.partition(": ")[2] for loss in heard.losses] == [
            "exit code -9",
            *["it gave no sign of life"] * 3,
            *["exit code -9"] * 2,
        ]


@pytest.mark.wide
@pytest.mark.parametrize("by", [KILL, pytest.param(STOP, marks=pytest.mark.slow)])
@in_loop
async def test_a_replica_that_shares_is_lost_and_another_one_shares(
    shop: Workshop, by: int
) -> None:
    async with pool_of(shop, **SEPARATE) as heard:
        os.kill(heard.pids[4], STOP)
        assert heard.pool.share() == 0
        assert told(await heard.lose(4, signal.Signals(by))) == ((), (0,))
        assert heard.pool.share() == 1
        await heard.until(lambda: heard.count(msg.Shared))
        ((who, report),) = [pair for pair in heard.said if isinstance(pair[1], msg.Shared)]
        assert who == 1
        assert isinstance(report, msg.Shared)
        assert report.weights is not None
        heard.pool.load_weights(1, {0: report.weights})
        await heard.until(lambda: heard.count(msg.WeightsLoaded) == 4)


@pytest.mark.wide
@in_loop
async def test_a_shard_takes_its_replica_along_and_no_other(shop: Workshop) -> None:
    settings: dict[str, Any] = FOUR | {
        "devices": CPU | {"per_node": 6, "layout": "separate", "training": 4}
    }
    async with pool_of(shop, **settings) as heard:
        assert told(await heard.lose(3, KILL)) == ((), (0,))
        assert heard.pool.replicas == (1,)
        assert told(await heard.lose(4, STOP)) == ((), (1,))
        await goes_on(heard, 1, 0)


@in_loop
async def test_a_frozen_worker_does_not_freeze_who_writes_to_it(shop: Workshop) -> None:
    """More than a pipe holds is written while nobody reads."""
    async with pool_of(shop, **SEPARATE) as heard:
        os.kill(heard.pids[0], STOP)
        decode(heard, 0, requests(10_000, 20))
        await heard.until(lambda: heard.losses)
        assert told(heard.losses[0]) == ((0,), ())
        assert heard.losses[0].text == "worker 0 died: it gave no sign of life"
        await goes_on(heard, 1, 0)


async def dies_young(shop: Workshop, worker: int, after_s: float, **settings: Any) -> None:
    """While the others are built, who would wait for it for minutes."""
    pool = WorkerPool(shop.config("young", **settings), max_length=200, total_updates=9)
    starting = asyncio.create_task(pool.start())
    pids = await soon(lambda: pool.pids)
    os.kill(pids[0 if worker else 1], STOP)  # so that not all are built before
    await asyncio.sleep(after_s)
    os.kill(pids[worker], KILL)
    with pytest.raises(WorkerError, match=rf"^worker {worker} died: exit code -9$"):
        await starting
    pool.close()
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


@pytest.mark.parametrize(("worker", "after_s"), [(0, 0.0), (3, 0.2)])
def test_one_that_dies_while_it_is_built_ends_the_start(
    shop: Workshop, worker: int, after_s: float
) -> None:
    settings: dict[str, Any] = {
        "devices": CPU | {"per_node": 4, "layout": "separate", "training": 2}
    }
    asyncio.run(dies_young(shop, worker, after_s, trainer={"kind": "fsdp"}, **settings))


@pytest.mark.cluster
@pytest.mark.alone
@pytest.mark.parametrize("after_s", [0.1, 0.5])
@pytest.mark.parametrize("worker", [0, 1])
def test_so_does_one_of_an_engine_of_two(tmp_path: Path, worker: int, after_s: float) -> None:
    shop = Workshop(tmp_path)
    shop.model = write_wide_model(tmp_path / "wide")
    settings: dict[str, Any] = FOUR | {"devices": CPU | {"per_node": 2}}
    engine = VLLM | {"tensor_parallel": 2}
    asyncio.run(dies_young(shop, worker, after_s, engine=engine, **settings))


# A member that freezes is test_apart_faults' too.
@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.alone
@pytest.mark.parametrize("by", [KILL, STOP])
@pytest.mark.parametrize("victim", [pytest.param(0, id="lead"), pytest.param(1, id="member")])
@in_loop
async def test_an_engine_of_two_ends_as_one(
    tmp_path: Path, by: signal.Signals, victim: int
) -> None:
    """In flight the other spins in shared memory: it is killed."""
    shop = Workshop(tmp_path)
    shop.model = write_wide_model(tmp_path / "wide")
    engine = VLLM | {"tensor_parallel": 2}
    async with pool_of(shop, engine=engine, **FOUR) as heard:
        await in_flight(heard, 0)
        assert told(await heard.lose(victim, by)) == ((0,), ())
        assert heard.outputs.keys() == {50}
        await soon(lambda: not Path(f"/proc/{heard.pids[1 - victim]}").exists())
        await goes_on(heard, 1, 100)
        assert told(await heard.lose(2 + victim, by)) == ((1,), ())
        assert heard.pool.replicas == (0, 1)


# What a planner regroups is lost together in test_apart_faults too.
@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.alone
@pytest.mark.parametrize("by", [KILL, STOP])
@pytest.mark.parametrize(
    "victim",
    [
        pytest.param(0, id="asleep"),
        pytest.param(3, id="member"),
        pytest.param(4, id="lead of the other"),
    ],
)
@in_loop
async def test_devices_that_were_put_together_are_lost_together(
    tmp_path: Path, by: signal.Signals, victim: int
) -> None:
    shop = Workshop(tmp_path)
    shop.model = write_wide_model(tmp_path / "wide")
    async with pool_of(shop, (1, 2), engine=VLLM, **FOUR) as heard:
        pool = heard.pool
        for engine in (0, 2):
            pool.form(EngineId(engine), (EngineId(engine), EngineId(engine + 1)))
        await heard.until(lambda: heard.count(msg.WeightsLoaded) == 2)
        for engine in (0, 2):
            decode(heard, engine, [*LONG])
        numbers = {0: 0, 3: 5, 4: 6}
        left = (2, 3) if victim < 4 else (0, 1)
        gone = (0, 1) if victim < 4 else (2, 3)
        assert told(await heard.lose(numbers[victim], by)) == (gone, ())
        await goes_on(heard, left[0], 100)
        pool.to_engine(EngineId(left[0]), msg.Abort(attempts=[r.attempt for r in LONG]))
        slept = heard.count(msg.Slept)
        assert pool.disband() == {left[0]: 2}
        await heard.until(lambda: heard.count(msg.Slept) > slept)
        assert pool.engines == left
        assert pool.replicas == (0, 2)


# An engine that sleeps is woken beside a replica: not before its gradients are summed.


PROMPT, ENGINE, REPLICA = PromptId("p"), EngineId(0), ReplicaId(0)


def gradients(heard: Heard, length: int) -> None:
    sample = Sample(
        prompt=PROMPT,
        index=0,
        prompt_tokens=np.array([3, 4], np.int32),
        tokens=np.ones(length, np.int32),
        logprobs=np.zeros(length, np.float32),
        reward=1.0,
        attempt=AttemptId(0),
        weights_version=0,
        finish_reason="stop",
    )
    group = Group(prompt=PROMPT, samples=(sample,), advantages=np.ones(1, np.float32))
    part = GroupPart(prompt=PROMPT, start=0, stop=1)
    heard.pool.to_replica(REPLICA, msg.Accumulate(parts=(part,), groups=[group]))


@pytest.mark.parametrize("tasks", [0, 3])
@in_loop
async def test_it_wakes_after_the_gradients_beside_it(tmp_path: Path, tasks: int) -> None:
    async with pool_of(Workshop(tmp_path), devices=CPU) as heard:
        heard.pool.to_engine(ENGINE, msg.Sleep())
        await heard.until(lambda: heard.count(msg.Slept))
        for _ in range(tasks):
            gradients(heard, 150)
        decode(heard, 0, requests(1, 4, forced=True))
        decode(heard, 0, requests(1, 4, forced=True, first=1))
        await heard.until(lambda: {0, 1} <= heard.outputs.keys())
        kinds = [type(report) for _, report in heard.said]
        woken = kinds.index(msg.WeightsLoaded)
        assert kinds[:woken].count(msg.Accumulated) == tasks
        assert [len(heard.outputs[n].tokens) for n in (0, 1)] == [4, 4]
