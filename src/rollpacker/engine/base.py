"""The engine protocol. A worker owns an engine and steps it; nothing here waits."""

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

# One of each: a message with many requests holds it once.
_TOKENS, _LOGPROBS = np.zeros(0, np.int32), np.zeros(0, np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How responses are sampled.

    Args:
        max_tokens: longest response, at least 1.
        temperature: 0 is greedy.
        top_p: nucleus mass in (0, 1].
        top_k: most likely tokens kept, 0 for all.
        stop: strings that end a response; the text up to and including them is kept.
        stop_token_ids: ids that end a response, the model's end tokens among them.
        ignore_stop: run to ``max_tokens`` whatever is sampled (forced lengths, benchmarks).
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
    """A process's place among those that share an engine, or a replica: one for each device, of
    which rank 0 leads. They meet once, at ``meeting``: the absolute path of a file that no engine
    has met at before; it may stay empty for one."""

    rank: int = 0
    size: int = 1
    meeting: str = ""


ALONE = Span()
"""An engine, or a replica, of one process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """When an engine decodes several tokens at once: it drafts them, and verifies the drafts.

    No sample depends on it: a token is drawn with its own uniform whatever was drafted.

    Args:
        below: most running sequences with which it drafts; 0: never.
        most: tokens of the longest draft.
        free: rows that a step may have at no cost.
        row_cost: extra time ``c`` of one more row, relative to an empty step. With ``b`` running, a
            draft stops when P(token is reached) < ``c*b/(1+c*b)``: below that the row costs more
            time than it saves.
    """

    below: int = 0
    most: int = 0
    free: int = 0
    row_cost: float = 0.0


NO_SPECULATION = Speculation()


# Without slots what is sent by the hundred: a frozen class with slots pickles through Python code.
@dataclass(frozen=True, kw_only=True, eq=False)
class Request:
    """One attempt to sample.

    Args:
        attempt: its id; unique among what the engine holds.
        group: requests of one group share their prompt's prefill.
        prompt: token ids, shape (P,), int32.
        seed: token ``t`` uses the ``t``-th uniform of this seed's stream, whatever else runs
            (``engine.sampling`` draws with it).
        generated: the response so far, shape (T,): sampled elsewhere (a migrated attempt), or that
            of earlier turns, with what an environment put behind them.
        logprobs: their sampler logprobs, shape (T,).
        hints: responses to the same prompt that other engines sampled, or this one in another
            epoch, each (T,): drafts may be taken from them.
        stays: another turn may follow: once it has ended, its KV is kept while there is room, until
            the attempt comes again (with more in ``generated``), is aborted, or weights are loaded.
        turn_start: tokens of ``generated`` that are of earlier turns: stop strings are looked for
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
        tokens: all response tokens, those of ``Request.generated`` included, shape (T,), int32.
        logprobs: sampler logprobs of ``tokens`` (after temperature, top-k and top-p), shape (T,).
        weights_version: version of the weights that sampled it.
        drafts: what they brought on this engine.
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
        running: sequences in the decode batch.
        waiting: sequences not admitted yet, preempted ones included.
        kv_used: share of the KV budget in use, 0 to 1, without what can be taken at any time (KV of
            turns that are over).
        preemptions: sequences thrown out for lack of KV and recomputed.
        generated_tokens: tokens sampled and kept.
        prefill_tokens: tokens of prompts (and recomputed responses) run through the model.
        cached_tokens: tokens of requests that were not, since KV of the attempt's last turn was
            found; 0 where the engine keeps none of it, or does not tell.
        rows: tokens run, drafts included, in steps that only decode; 0 where the engine does not
            tell.
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
    """What an engine is able to do, as it says itself once it is built.

    Args:
        kv_tokens: KV budget.
        max_length: longest prompt and response together, tokens; more can never fit.
        tensor_parallel: numbers of devices that it can span.
        latency: seconds of a decode step by batch size, measured, without what contexts add to it
            where that was measured.
        prefill_token_s: seconds for each token of a prompt (or of a response computed again).
        exact_seeds: the same seed gives the same response, bit by bit, whatever runs beside it.
        context_token_s: seconds that each context token of the batch adds to a decode step; None
            where it was not measured.
        speculates: whether it decodes ahead (``Engine.speculate``).
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
    """Numbers ``start`` to ``start + count`` of a seed's stream; ``start`` is a multiple of 4.

    The stream is that of ``Generator(Philox(key=seed)).random()`` (Salmon et al., 2011), which
    makes four numbers of each counter value.
    """
    assert start % 4 == 0
    return Generator(Philox(key=seed, counter=start // 4)).random(count)


def least(one: EngineInfo, other: EngineInfo) -> EngineInfo:
    """What holds for both of two engines of one kind: each may have measured another budget."""
    kv_tokens = min(one.kv_tokens, other.kv_tokens)
    return replace(one, kv_tokens=kv_tokens, max_length=min(one.max_length, other.max_length))


class Engine(Protocol):
    """Continuous batching over the devices it spans. Not thread-safe: its worker steps it."""

    def info(self) -> EngineInfo:
        """Its facts, by measurement; nothing may be held. Its counters move."""
        ...

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests; one may go on with an attempt that has stopped, and is no other's id.

        Raises ``ValueError`` if one can never fit (context or KV budget).
        """
        ...

    def speculate(self, how: Speculation) -> None:
        """Decode ahead, until weights are loaded; nothing where it cannot (``EngineInfo``)."""
        ...

    def step(self) -> list[Output]:
        """Admit what fits, decode a token for every running sequence, or several where drafts of
        them prove right; return what finished."""
        ...

    def abort(self, attempts: Collection[AttemptId]) -> list[Output]:
        """Remove attempts and return their partial outputs; unknown ids are ignored.

        Attempts that have stopped are not held: nothing is returned, KV of theirs is given up.
        """
        ...

    def load_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]] | None, version: int
    ) -> None:
        """Take new weights, by the checkpoint's names; None when they are shared in-process.

        Drops all KV. Raises ``RuntimeError`` when attempts are held.
        """
        ...

    def sleep(self) -> None:
        """Give back the memory of KV cache and maybe of own weights; nothing may be held."""
        ...

    def wake(self) -> None:
        """Allocate it again; before anything is submitted, weights have to be loaded."""
        ...

    def busy(self) -> bool: ...

    def stats(self) -> EngineStats: ...

    def close(self) -> None:
        """End it, and what it holds of its process."""
        ...


def stops_of(request: Request) -> tuple[str, ...]:
    """The strings that end it."""
    return () if request.params.ignore_stop else request.params.stop


def check_room(info: EngineInfo, longest: int) -> None:
    """Raise ``ValueError`` where a response of ``longest`` tokens fits behind no prompt at all."""
    if info.max_length <= longest:
        raise ValueError(
            f"an engine has room for {info.max_length} tokens of a sequence, not for a prompt and "
            f"{longest} of its response: raise engine.kv_tokens or lower "
            "rollout.max_completion_length"
        )


def check_request(request: Request, *, room: int, vocabulary: int, decodes: bool) -> None:
    """Raise ``ValueError`` unless a request fits ``room`` tokens and its ids are below
    ``vocabulary``: kernels do not check bounds, so an unknown id would read whatever lies behind
    the embedding. Stop strings need a tokenizer, which ``decodes``."""
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
"""Characters that part of one may be decoded as, at either end of a window: of four bytes."""


class StopWatcher:
    """Watches one response for any of its stop strings, behind its first ``start`` tokens.

    Tokens are decoded in windows: of one that is several times as long as any stop string only the
    last characters are kept, so each token is decoded a bounded number of times. It has looked at
    the first ``seen`` tokens.
    """

    def __init__(self, tokenizer: Any, stop: tuple[str, ...], start: int = 0) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._kept = max(map(len, stop)) + 2 * _TORN
        self._start = start
        self.seen = 0

    def found(self, tokens: NDArray[np.int32]) -> bool:
        """Whether a stop string ends within the tokens that are new since the last call."""
        self.seen = len(tokens)
        window = self._tokenizer.decode(tokens[self._start :].tolist())
        if any(s in window for s in self._stop):
            return True
        if len(window) >= 4 * self._kept + 64:
            self._advance(tokens)
        return False

    def _advance(self, tokens: NDArray[np.int32]) -> None:
        """Keep as many tokens as a stop string may still need and forget those before."""
        start = len(tokens)
        while len(self._tokenizer.decode(tokens[start:].tolist())) < self._kept:
            start -= 1
        self._start = start


GROUP = Path("/sys/fs/cgroup")


def free_bytes() -> int:
    """What can be had: of the machine, or of the container where that has less left."""
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
    except OSError:
        return _elsewhere()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


def _elsewhere() -> int:
    """On other systems than Linux; all that there is, where psutil is not installed."""
    with suppress(ImportError):
        import psutil

        return psutil.virtual_memory().available
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
