"""verl's manager of agent loops, with the actor in which the policy decides."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray  # pyright: ignore[reportMissingImports]
from ray.util.scheduling_strategies import (  # pyright: ignore[reportMissingImports]
    NodeAffinitySchedulingStrategy,
)

from rollpacker.core import decisions as do
from rollpacker.core.types import Prompt, PromptId
from rollpacker.policy.settings import RolloutSettings
from rollpacker.verl.host import PlainManager
from rollpacker.verl.round_driver import HostedRound, InOrder, Report, RoundDriver
from rollpacker.verl.worker import Worker


class PolicyActor:
    """A ``RoundDriver`` that workers and trainer call. ``rollout`` raises its errors."""

    def __init__(self, workers: Sequence[Any]) -> None:
        self._workers = workers
        self._sent = [0] * len(workers)
        self._inboxes: list[InOrder[Sequence[Report]]] = [InOrder() for _ in workers]
        self._tasks: set[asyncio.Task[None]] = set()
        self._round: asyncio.Future[None] | None = None
        self._error: Exception | None = None

    async def begin(
        self, settings: dict[str, Any], folder: str, state: Mapping[str, Any] | None
    ) -> None:
        told = RolloutSettings.from_json(settings)
        self._driver = RoundDriver(told, Path(folder), state, self._send)
        for worker in self._workers:
            self._begin(self._watch(worker))

    async def start(self, step: int, remaining: int) -> int:
        if self._error is not None:
            raise self._error
        self._round = asyncio.get_running_loop().create_future()
        return self._driver.start(step, remaining)

    async def drawn(self, prompts: Sequence[Prompt]) -> tuple[PromptId, ...]:
        return self._driver.drawn(prompts)

    async def place(self, workers: Mapping[PromptId, int]) -> None:
        self._driver.place(workers)

    async def report(self, worker: int, number: int, reports: Sequence[Report]) -> None:
        try:
            for batch in self._inboxes[worker].take(number, reports):
                self._driver.take(batch)
        except Exception as error:
            self._fail(error)
            return
        if self._driver.done and self._round is not None and not self._round.done():
            self._round.set_result(None)

    async def rollout(self) -> HostedRound:
        """Wait until the round is over and its kept responses are in the transfer queue. Raises
        ``RoundError``, or the error of a worker that died."""
        assert self._round is not None
        await self._round
        return self._driver.round

    async def trained(self, seconds: float) -> tuple[dict[str, float], tuple[str, ...]]:
        return self._driver.trained(seconds), self._driver.alarms

    async def published(self, step: int) -> None:
        self._driver.published(step)

    async def end_epoch(self, epoch: int) -> None:
        self._driver.end_epoch(epoch)

    async def held(self) -> int:
        return self._driver.held

    async def state_dict(self) -> dict[str, Any]:
        return self._driver.state_dict()

    async def close(self) -> None:
        self._driver.close()

    def _send(self, worker: int, decisions: Sequence[do.Decision]) -> None:
        number, self._sent[worker] = self._sent[worker], self._sent[worker] + 1
        self._begin(self._call(worker, number, decisions))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _call(self, worker: int, number: int, decisions: Sequence[do.Decision]) -> None:
        try:
            await self._workers[worker].decide.remote(number, decisions)
        except Exception as error:
            self._fail(error)

    async def _watch(self, worker: Any) -> None:
        try:
            await worker.live.remote()
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._error = error
        if self._round is not None and not self._round.done():
            self._round.set_exception(error)
            self._round.exception()  # nobody may wait for it yet


class AgentLoopManager(PlainManager):
    """verl's ``AgentLoopManagerTQ`` with workers that run the policy's decisions."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = ray.remote(Worker)

    async def _init_agent_loop_workers(self) -> None:
        await super()._init_agent_loop_workers()
        workers = self.agent_loop_workers
        # On the trainer's node, for the journal.
        here = NodeAffinitySchedulingStrategy(
            node_id=ray.get_runtime_context().get_node_id(), soft=False
        )
        actor = ray.remote(PolicyActor).options(num_cpus=0, scheduling_strategy=here)
        self.policy = actor.remote(workers)
        await asyncio.gather(
            *(worker.follow.remote(self.policy, n) for n, worker in enumerate(workers))
        )

    def generate_sequences(self, prompts: Any) -> None:
        """Give rows to workers. Training rows begin when the policy knows their workers."""
        training = "validate" not in prompts
        workers = len(self.agent_loop_workers)
        super().generate_sequences(prompts)
        if training:
            # Cut like the rows above.
            chunks = enumerate(prompts.chunk(workers))
            placed = {PromptId(uid): n for n, chunk in chunks for uid in chunk["uid"]}
            ray.get(self.policy.place.remote(placed))
