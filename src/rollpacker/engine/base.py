"""The engine protocol. A worker owns an engine and steps it. Nothing here waits."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.random import Generator, Philox
from numpy.typing import NDArray

from rollpacker.core.types import NO_DRAFTS, AttemptId, Drafted, FinishReason, PromptId

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch


Ints = NDArray[np.int32]
Floats = NDArray[np.float32]

# Shared defaults: pickle stores each once in a message of many requests.
_TOKENS, _LOGPROBS = np.zeros(0, np.int32), np.zeros(0, np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How responses are sampled.

    Args:
        max_tokens: longest response, at least 1.
        temperature: 0 is greedy.
        top_p: nucleus mass in (0, 1].
        top_k: most likely tokens kept, 0 for all.
        stop: strings that end a response. The text keeps them.
        stop_token_ids: ids that end a response, the model's end tokens among them.
        ignore_stop: run to ``max_tokens`` (forced lengths, benchmarks).
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_stop: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """The place of one process among those that span an engine or a replica, one process a device.
    Rank 0 leads. They meet once, at the absolute path ``meeting`` of a file that no earlier engine
    used. It may be empty for one process."""

    rank: int = 0
    size: int = 1
    meeting: str = ""


ALONE = Span()


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """When an engine drafts several tokens and verifies them in one step. No sample depends on it.

    Args:
        below: most running sequences with which it drafts, 0 for never.
        most: tokens of the longest draft.
        free: rows that a step may have at no cost.
        row_cost: extra time ``c`` of one more row, relative to an empty step. With ``b`` running, a
            draft stops when P(token is reached) < ``c*b/(1+c*b)``, as the row would cost more than
            it saves.
    """

    below: int = 0
    most: int = 0
    free: int = 0
    row_cost: float = 0.0


NO_SPECULATION = Speculation()


# No slots, as hundreds are sent: a frozen class with slots pickles through slow Python code.
@dataclass(frozen=True, kw_only=True, eq=False)
class Request:
    """One attempt to sample.

    Args:
        group: requests of one group share the prefill of their prompt.
        prompt: token ids, shape (P,), int32.
        seed: token ``t`` uses the ``t``-th uniform of this seed's stream (see ``engine.sampling``).
        generated: the response so far, shape (T,): of a migrated attempt, or of earlier turns with
            the environment's tokens.
        logprobs: the sampler's logprobs of ``generated``, shape (T,).
        hints: other responses to the same prompt, each (T,), for drafts.
        stays: another turn may follow, so the engine keeps the KV while there is room. The
            attempt's return, an abort or new weights end that.
        turn_start: tokens of ``generated`` that belong to earlier turns. Stop strings count only
            behind them.
    """

    attempt: AttemptId
    group: PromptId
    prompt: NDArray[np.int32]
    params: SamplingParams
    seed: int
    generated: NDArray[np.int32] = field(default_factory=lambda: _TOKENS)
    logprobs: NDArray[np.float32] = field(default_factory=lambda: _LOGPROBS)
    hints: Sequence[NDArray[np.int32]] = ()
    stays: bool = False
    turn_start: int = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class Output:
    """A finished or aborted attempt.

    Args:
        tokens: all response tokens, ``Request.generated`` included, shape (T,), int32.
        logprobs: the sampler's logprobs after temperature, top-k and top-p, shape (T,).
    """

    attempt: AttemptId
    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    finish_reason: FinishReason
    weights_version: int
    drafts: Drafted = NO_DRAFTS


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Counters since the engine was built, and its load now.

    Args:
        waiting: sequences not admitted yet, preempted ones included.
        kv_used: share of the KV budget in use, 0 to 1, without KV of finished turns.
        prefill_tokens: of prompts and recomputed responses, run through the model.
        cached_tokens: with KV from the attempt's last turn, 0 if not counted.
        rows: tokens run, drafts included, in steps that only decode. 0 if not counted.
    """

    running: int
    waiting: int
    kv_used: float
    preemptions: int
    steps: int
    generated_tokens: int
    prefill_tokens: int
    cached_tokens: int = 0
    rows: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """An engine's abilities, as it measures them once it is built.

    Args:
        max_length: longest prompt and response together, in tokens.
        tensor_parallel: numbers of devices that it can span.
        latency: seconds of a decode step by batch size, without the share of contexts if measured.
        prefill_token_s: seconds for each token of a prompt or recomputed response.
        exact_seeds: a seed gives the same response, bit by bit, whatever runs beside it.
        context_token_s: seconds of a decode step per context token of the batch. None if not
            measured.
    """

    kv_tokens: int
    max_length: int
    tensor_parallel: tuple[int, ...]
    latency: dict[int, float]
    prefill_token_s: float
    exact_seeds: bool
    context_token_s: float | None = None
    speculates: bool = False


def uniforms(seed: int, start: int, count: int) -> NDArray[np.float64]:
    """Numbers ``start`` to ``start + count`` of a seed's stream. ``start`` is a multiple of 4. The
    stream is ``Generator(Philox(key=seed)).random()`` (Salmon et al., 2011), which makes four
    numbers of each counter value."""
    assert start % 4 == 0
    return Generator(Philox(key=seed, counter=start // 4)).random(count)


def least(one: EngineInfo, other: EngineInfo) -> EngineInfo:
    """The limits that hold for two engines of one kind, as each may have measured another
    budget."""
    kv_tokens = min(one.kv_tokens, other.kv_tokens)
    return replace(one, kv_tokens=kv_tokens, max_length=min(one.max_length, other.max_length))


class Engine(Protocol):
    """Continuous batching over the devices that it spans. Not thread-safe: its worker steps it."""

    def info(self) -> EngineInfo:
        """Measure the engine. It must be idle, and its counters move."""
        ...

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests. One may continue a stopped attempt. Raises ``ValueError`` if one can
        never fit (context or KV budget)."""

    def speculate(self, how: Speculation) -> None:
        """Decode ahead until weights are loaded, if the engine can (``EngineInfo``). Raises
        ``ValueError`` on drafts of more than ``drafts.LONGEST_DRAFT`` tokens."""

    def step(self) -> list[Output]:
        """Admit the requests that fit, and decode one token for every running sequence, or several
        if drafts are right. Returns the finished attempts."""
        ...

    def abort(self, attempts: Collection[AttemptId]) -> list[Output]:
        """Remove attempts and return their partial outputs. Unknown ids are ignored. A stopped
        attempt returns nothing, and loses its kept KV."""
        ...

    def load_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]] | None, version: int
    ) -> None:
        """Take new weights, by the checkpoint's names. None if they are shared in-process. Drops
        all KV. Raises ``RuntimeError`` when attempts are held, ``ValueError`` on names that are not
        the model's."""

    def sleep(self) -> None:
        """Free the memory of the KV cache, and of the engine's own weights if it can. It must be
        idle."""

    def wake(self) -> None:
        """Allocate the memory again. Weights must be loaded before the next request."""

    def busy(self) -> bool: ...

    def stats(self) -> EngineStats: ...

    def close(self) -> None: ...


def stops_of(request: Request) -> tuple[str, ...]:
    """The stop strings of a request."""
    return () if request.params.ignore_stop else request.params.stop


def check_room(info: EngineInfo, longest: int) -> None:
    """Raise ``ValueError`` unless a response of ``longest`` tokens fits behind a prompt."""
    if info.max_length <= longest:
        raise ValueError(
            f"an engine has room for {info.max_length} tokens of a sequence, too few for a prompt "
            f"and a response of {longest}: raise engine.kv_tokens or lower "
            "rollout.max_completion_length"
        )


def check_request(request: Request, *, room: int, vocabulary: int, decodes: bool) -> None:
    """Raise ``ValueError`` unless a request fits ``room`` tokens and its ids are below
    ``vocabulary``. Kernels do not check bounds. Stop strings need a tokenizer (``decodes``)."""
    size, most = len(request.prompt), request.params.max_tokens
    if size == 0 or size + most > room:
        raise ValueError(
            f"attempt {request.attempt}: {size} prompt + {most} response tokens "
            f"do not fit {room}: lower rollout.max_completion_length or raise engine.kv_tokens"
        )
    if len(request.generated) >= most:
        raise ValueError(f"attempt {request.attempt} has all its max_tokens already")
    for ids in (request.prompt, request.generated):
        if len(ids) and not 0 <= ids.min() <= ids.max() < vocabulary:
            raise ValueError(
                f"attempt {request.attempt}: token ids must be in 0..{vocabulary - 1}: "
                "use the tokenizer that belongs to the model"
            )
    if stops_of(request) and not decodes:
        raise ValueError("rollout.stop needs the model's tokenizer")


_TORN = 3
"""Characters at either end of a window that may decode from a part of one, which has up to four
bytes."""


class StopWatcher:
    """Watches one response for its stop strings, behind its first ``start`` tokens. Only the end of
    a long window is kept, so each token is decoded a bounded number of times."""

    def __init__(self, tokenizer: Any, stop: tuple[str, ...], start: int = 0) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._kept = max(map(len, stop)) + 2 * _TORN
        self._start = start
        self.seen = 0

    def found(self, tokens: NDArray[np.int32]) -> bool:
        self.seen = len(tokens)
        window = self._tokenizer.decode(tokens[self._start :].tolist())
        if any(s in window for s in self._stop):
            return True
        if len(window) >= 4 * self._kept + 64:
            self._advance(tokens)
        return False

    def _advance(self, tokens: NDArray[np.int32]) -> None:
        start = len(tokens)
        while len(self._tokenizer.decode(tokens[start:].tolist())) < self._kept:
            start -= 1
        self._start = start


GROUP = Path("/sys/fs/cgroup")


def free_bytes() -> int:
    """Free memory of the machine, or of the container if that has less left."""
    free = _machine_free_bytes()
    try:
        limit = int((GROUP / "memory.max").read_text(encoding="ascii"))
        used = int((GROUP / "memory.current").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return free
    return min(free, max(0, limit - used))


def _machine_free_bytes() -> int:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:  # not Linux
        with suppress(ImportError):
            import psutil

            return psutil.virtual_memory().available
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")  # all, not only the free
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
