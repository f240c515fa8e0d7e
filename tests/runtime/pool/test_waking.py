"""An engine that sleeps is woken beside a replica: not before its gradients are summed."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
from pool_jobs import CPU, Heard, decode, pool_of, requests
from runtime_jobs import Workshop

from rollpacker.core.types import AttemptId, EngineId, Group, GroupPart, PromptId, ReplicaId, Sample
from rollpacker.runtime.messages import messages as msg

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
def test_it_wakes_after_the_gradients_beside_it(tmp_path: Path, tasks: int) -> None:
    async def main() -> None:
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

    asyncio.run(main())
