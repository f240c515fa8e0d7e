"""Scripted responses: every attempt's length and tokens follow from its seed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np

from rollpacker.config import FakeEngineConfig
from rollpacker.core.types import AttemptId, FinishReason
from rollpacker.engine.base import EngineInfo, EngineStats, Output, Request, Speculation

if TYPE_CHECKING:
    import torch

_VOCABULARY = 16
_ENOUGH = 1 << 30  # Tokens. It keeps no KV.


def scripted_length(config: FakeEngineConfig, seed: int) -> int:
    """Tokens of this seed's response, before ``max_tokens`` cuts it."""
    return config.lengths[_hash(f"length/{seed}") % len(config.lengths)]


def scripted_token(seed: int, index: int) -> int:
    """Token ``index`` of this seed's response."""
    return _hash(f"{seed}/{index}") % _VOCABULARY


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=4).digest(), "big")


@dataclass(slots=True, eq=False)
class _Scripted:
    request: Request
    length: int
    tokens: list[int]
    admitted: bool = False


class FakeEngine:
    """Gives a token to every running attempt in each step, and computes nothing. ``concurrency``
    limits the running attempts, 0 for all."""

    def __init__(self, config: FakeEngineConfig, *, concurrency: int = 0) -> None:
        self._config = config
        self._concurrency = concurrency
        self._held: dict[AttemptId, _Scripted] = {}
        self._version = 0
        self._steps = self._generated = self._prefilled = 0

    def info(self) -> EngineInfo:
        return EngineInfo(
            kv_tokens=_ENOUGH,
            max_length=_ENOUGH,
            tensor_parallel=(1,),
            latency={1: 1e-3, 64: 1e-3},
            prefill_token_s=0.0,
            exact_seeds=True,
        )

    def submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if request.attempt in self._held:
                raise ValueError(f"attempt {request.attempt} is already held")
            if len(request.generated) >= request.params.max_tokens:
                raise ValueError(f"attempt {request.attempt} has all its max_tokens already")
            length = scripted_length(self._config, request.seed)
            self._held[request.attempt] = _Scripted(
                request, length, [int(t) for t in request.generated]
            )

    def speculate(self, how: Speculation) -> None: ...

    def step(self) -> list[Output]:
        running = self._running()
        if not running:
            return []
        self._steps += 1
        finished: list[Output] = []
        for attempt in running:
            request, done = attempt.request, attempt.tokens
            if not attempt.admitted:
                attempt.admitted = True
                self._prefilled += len(request.prompt) + len(done)
            done.append(scripted_token(request.seed, len(done)))
            self._generated += 1
            limit = request.params.max_tokens
            if not request.params.ignore_stop and len(done) >= min(attempt.length, limit):
                reason: FinishReason = "stop" if attempt.length <= limit else "length"
                finished.append(self._finish(attempt, reason))
            elif len(done) >= limit:
                finished.append(self._finish(attempt, "length"))
        return finished

    def abort(self, attempts: Collection[AttemptId]) -> list[Output]:
        return [self._finish(self._held[a], "abort") for a in attempts if a in self._held]

    def load_weights(
        self,
        weights: Iterable[tuple[str, torch.Tensor]] | None,  # noqa: ARG002 - the protocol's
        version: int,
    ) -> None:
        if self._held:
            raise RuntimeError("weights cannot change while attempts are held: abort them first")
        self._version = version

    def sleep(self) -> None:
        assert not self._held

    def wake(self) -> None: ...

    def close(self) -> None: ...

    def busy(self) -> bool:
        return bool(self._held)

    def stats(self) -> EngineStats:
        running = len(self._running())
        return EngineStats(
            running=running,
            waiting=len(self._held) - running,
            kv_used=0.0,
            preemptions=0,
            steps=self._steps,
            generated_tokens=self._generated,
            prefill_tokens=self._prefilled,
        )

    def _running(self) -> list[_Scripted]:
        return list(self._held.values())[: self._concurrency or None]

    def _finish(self, attempt: _Scripted, reason: FinishReason) -> Output:
        request = attempt.request
        del self._held[request.attempt]
        return Output(
            attempt=request.attempt,
            tokens=np.array(attempt.tokens, np.int32),
            logprobs=np.array([-0.125 * (t + 1) for t in attempt.tokens], np.float32),
            finish_reason=reason,
            weights_version=self._version,
        )
