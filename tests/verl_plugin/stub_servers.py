"""Servers in the place of vLLM's: responses of known lengths, which take their time."""

from __future__ import annotations

import asyncio
import math
import random
import time
from dataclasses import dataclass
from typing import Any

import ray
from verl.workers.rollout.replica import RolloutReplica, TokenOutput

FIRST_S, TOKEN_S = 0.02, 0.004
MEDIAN, SIGMA = 24.0, 0.9


@dataclass
class Request:
    """One that a server was given.

    Args:
        version: of the weights that it had.
        prompt: token ids.
        length: tokens that the response would have.
        decoded: tokens that it had when it was aborted.
        outcome: ``finished``, ``aborted``, ``failed`` or, while it runs, ``alive``.
    """

    version: int
    prompt: tuple[int, ...]
    length: int
    decoded: int = 0
    outcome: str = "alive"


class Server:
    """Lengths have a heavy tail, and hardly depend on the prompt."""

    def __init__(self, rank: int, cap: int, fails_every: int) -> None:
        self._rank, self._cap, self._fails_every = rank, cap, fails_every
        self._requests: list[Request] = []
        self._version = -1
        self._alive_at_update = 0

    def _length(self, prompt: tuple[int, ...]) -> int:
        seed = f"{self._rank}/{self._version}/{len(self._requests)}/{prompt}"
        drawn = MEDIAN * math.exp(SIGMA * random.Random(seed).gauss(0.0, 1.0))
        return max(1, min(self._cap, round(drawn)))

    async def generate(
        self, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any
    ) -> TokenOutput:
        prompt = tuple(prompt_ids)
        request = Request(self._version, prompt, self._length(prompt))
        self._requests.append(request)
        fails = self._fails_every and len(self._requests) % self._fails_every == 0
        start_s = time.monotonic()
        try:
            await asyncio.sleep(FIRST_S + TOKEN_S * request.length)
        except asyncio.CancelledError:
            request.outcome = "aborted"
            request.decoded = max(0, round((time.monotonic() - start_s - FIRST_S) / TOKEN_S))
            raise
        if fails:
            request.outcome = "failed"
            raise RuntimeError("out of memory")
        request.outcome = "finished"
        return TokenOutput(
            token_ids=[request.length % 7 + 3] * request.length,
            log_probs=[-0.5] * request.length,
            stop_reason="completed",
            extra_fields={"global_steps": self._version},
        )

    async def load(self, version: int) -> None:
        """New weights."""
        self._alive_at_update += sum(each.outcome == "alive" for each in self._requests)
        self._version = version

    async def sleep(self) -> None:
        self._alive_at_update += sum(each.outcome == "alive" for each in self._requests)

    async def wake_up(self) -> None:
        pass

    async def seen(self) -> tuple[list[Request], int]:
        """All requests, and how many were alive when weights changed or servers slept."""
        return self._requests, self._alive_at_update


class Replica(RolloutReplica):
    """verl's replica over such a server."""

    def get_ray_class_with_init_args(self) -> Any:
        raise AssertionError("hybrid replicas need none")

    async def launch_servers(self) -> None:
        cap, more = self.config.response_length, self.config.engine_kwargs.get("stub") or {}
        server = (
            ray.remote(Server)
            .options(num_cpus=0)
            .remote(self.replica_rank, cap, more.get("fails_every", 0))
        )
        self.servers = [server]
        self._server_handle, self._server_address = server, f"stub-{self.replica_rank}"

    async def init_hybrid(self, worker_group: Any) -> None:
        await self.launch_servers()


class Group:
    """The trained model's processes, which have nothing to do: ``RayWorkerGroup`` in verl."""

    world_size = 2

    def __init__(self) -> None:
        self._dispatch_info = {"actor": [0]}
        self.servers: list[Any] = []
        self.trained: list[list[str]] = []

    def update_weights(self, global_steps: int, mode: str) -> list[Any]:
        assert mode == "naive"
        return [server.load.remote(global_steps) for server in self.servers]

    def update_actor(self, batch: Any) -> dict[str, Any]:
        self.trained.append(list(batch.keys))
        return {"metrics": {"mfu": [0.0], "grad_norm": [1.0]}}

    def save_checkpoint(self, *_: Any, **__: Any) -> None:
        pass

    def load_checkpoint(self, *_: Any, **__: Any) -> None:
        pass
