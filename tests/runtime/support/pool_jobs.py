"""A pool of real workers without a job: what is killed in it, and what is heard of that."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
from runtime_jobs import Workshop

from rollpacker.core.types import AttemptId, EngineId, PromptId
from rollpacker.engine.base import Output, Request, SamplingParams
from rollpacker.runtime.messages import messages as msg
from rollpacker.runtime.pool.pool import Listener, Loss, WorkerPool
from rollpacker.runtime.step.publishing import publish

BEAT_S = 1.0
_PATIENCE_S = 120.0
CPU: dict[str, Any] = {"pin": False, "kind": "cpu"}
VLLM: dict[str, Any] = {"kind": "vllm", "max_running": 16, "kv_tokens": 4096}
_SHARED_MEMORY = Path("/dev/shm")


class Heard:
    """A started pool, and what it told since."""

    def __init__(self, pool: WorkerPool) -> None:
        self.pool = pool
        self.pids = pool.pids
        self.said: list[tuple[int, msg.EngineReport | msg.ReplicaReport]] = []
        self.losses: list[Loss] = []
        self.outputs: dict[int, Output] = {}
        self._more = asyncio.Event()

    def listener(self) -> Listener:
        """Notes everything."""
        return Listener(self._engine, self._hear, self._lose)

    def _engine(self, engine: int, report: msg.EngineReport) -> None:
        if isinstance(report, msg.Finished | msg.Aborted):
            self.outputs.update({output.attempt: output for output in report.outputs})
        self._hear(engine, report)

    def _hear(self, who: int, report: Any) -> None:
        self.said.append((who, report))
        self._more.set()

    def _lose(self, loss: Loss) -> None:
        self.losses.append(loss)
        self._more.set()

    async def until(self, reached: Callable[[], object]) -> None:
        """Wait for reports."""
        async with asyncio.timeout(_PATIENCE_S):
            while not reached():
                self._more.clear()
                await self._more.wait()

    def count(self, kind: type, who: int | None = None) -> int:
        """Reports of a kind."""
        return sum(isinstance(r, kind) and who in (None, w) for w, r in self.said)

    async def lose(self, worker: int, by: signal.Signals) -> Loss:
        """Strike a worker; what is told, at most three heartbeats of this loop later."""
        before, looks = len(self.losses), 0
        os.kill(self.pids[worker], by)
        while len(self.losses) == before:
            await asyncio.sleep(BEAT_S / 4)
            looks += 1
            assert looks <= 4 * 3, "not noticed"
        return self.losses[-1]


@asynccontextmanager
async def pool_of(
    shop: Workshop, sizes: Sequence[int] = (), **changes: Any
) -> AsyncIterator[Heard]:
    """Started, with weights, and closed: nothing of it stays in shared memory."""
    config = shop.config("pool", cluster={"heartbeat_s": BEAT_S}, **changes)
    pool = WorkerPool(config, max_length=200, total_updates=9, sizes=sizes)
    try:
        await pool.start()
        await publish(pool, 0)
        heard = Heard(pool)
        with pool.listen(heard.listener()):
            yield heard
    finally:
        pids, name = pool.pids, pool._nodes[0].folder.name
        pool.close()
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    assert not [*_SHARED_MEMORY.glob(f"{name}*")]


def requests(count: int, tokens: int, *, forced: bool = False, first: int = 0) -> list[Request]:
    """For a model of ``runtime_jobs``; ``forced``: of that length exactly."""
    params = SamplingParams(max_tokens=tokens, stop_token_ids=(0,), ignore_stop=forced)
    return [
        Request(
            attempt=AttemptId(n),
            group=PromptId(f"p{n}"),
            prompt=np.array([3, 4 + n % 5, 5], np.int32),
            params=params,
            seed=n,
        )
        for n in range(first, first + count)
    ]


def decode(heard: Heard, engine: int, asked: Sequence[Request]) -> None:
    """Let an engine sample these."""
    heard.pool.to_engine(EngineId(engine), msg.Submit(requests=asked))
