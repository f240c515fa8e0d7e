"""What ``step.py`` feeds the driver with: workers that do not decode, problems, a reward."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import pickle
import random
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rollpacker.config import RunConfig
from rollpacker.core.types import Device, EngineId, Prompt, PromptId, ReplicaId
from rollpacker.data.base import Row
from rollpacker.data.source import PromptSource
from rollpacker.engine.base import EngineInfo, Output, Request
from rollpacker.runtime.attempts.attempts import Problems
from rollpacker.runtime.attempts.rewards import Rewards
from rollpacker.runtime.cluster.nodes import Node
from rollpacker.runtime.ipc.clock import Clock
from rollpacker.runtime.ipc.link import encode
from rollpacker.runtime.messages import messages as msg
from rollpacker.runtime.pool.placement import ProcessSlot, Topology
from rollpacker.runtime.pool.pool import WorkerPool
from rollpacker.runtime.worker.worker import EnginePart, ReplicaPart
from rollpacker.train.base import Partial, Update

MEDIAN, SIGMA, CAP = 1250, 1.0, 16384
TOKEN_S, GRADIENT_S, UPDATE_S = 0.02, 2e-5, 1.0
UNGRADED = 64
Apart = AbstractContextManager[None]


def score(completions: Sequence[str], **_: Any) -> list[float]:
    """The reward: cheap, and different within a group."""
    return [float(len(completion) % 7 < 3) for completion in completions]


class Simulated(Clock):
    """The time of the report that is handled."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def at(self, monotonic: float) -> float:
        return monotonic


def alone(number: int) -> ProcessSlot:
    """An engine and a replica on a device."""
    return ProcessSlot(
        place=("cpu", ()),
        device=Device(0, number),
        engine=EnginePart(engine=EngineId(number)),
        replica=ReplicaPart(replica=ReplicaId(number)),
    )


class StandIns(WorkerPool):
    """Workers that only say what real ones would: an agenda of reports in simulated time."""

    def __init__(self, config: RunConfig, apart: Apart, clock: Simulated, corpus: Any) -> None:
        super().__init__(config, max_length=CAP, total_updates=1)
        count = config.devices.per_node or 1
        self._live = {*range(count)}
        self._topology = Topology([alone(n) for n in range(count)])
        self._nodes = [Node(number=0, places=(), folder=Path("stand-ins"))]
        self.infos[1] = EngineInfo(
            kv_tokens=1 << 24,
            max_length=1 << 20,
            tensor_parallel=(1,),
            latency={size: TOKEN_S * (1 + size / 256) for size in (1, 16, 64, 256)},
            prefill_token_s=0.0,
            exact_seeds=True,
        )
        self._apart, self._clock, self._corpus = apart, clock, corpus
        self._agenda: list[tuple[float, int, int, Any]] = []
        self._order = itertools.count()
        self._running: dict[int, tuple[Request, float]] = {}
        self._free_s = dict.fromkeys(range(count), 0.0)
        self.responses = self.tokens = self.sent = 0

    def _send(self, workers: Iterable[int], command: msg.Command) -> None:
        for number in workers:
            size = len(encode(command))
            with self._apart:
                self.sent += size
                self._take(number, command)

    def close(self) -> None:
        self._machines.close()

    def _take(self, worker: int, command: msg.Command) -> None:
        now = self._clock.now
        match command:
            case msg.Submit():
                for request in command.requests:
                    left = length_of(request.seed) - len(request.generated)
                    self._running[request.attempt] = request, now
                    self._later(now + left * TOKEN_S, worker, request)
            case msg.Abort():
                self._later(now + TOKEN_S, worker, tuple(command.attempts))
            case msg.Accumulate():
                tokens = sum(len(s.tokens) for g in command.groups for s in g.samples)
                began = max(now, self._free_s[worker])
                self._free_s[worker] = began + tokens * GRADIENT_S
                partial = Partial(normaliser=tokens, tokens=tokens, sums={"loss": 0.0})
                report = msg.Accumulated(
                    parts=command.parts,
                    partial=partial,
                    start_s=began,
                    end_s=self._free_s[worker],
                )
                self._later(report.end_s, worker, report)
            case msg.Apply():
                update = Update(applied=True, grad_norm=1.0, learning_rate=1e-6, metrics={})
                report = msg.Applied(update=update, checksum=0, start_s=now, end_s=now + UPDATE_S)
                self._later(report.end_s, worker, report)
            case msg.LoadWeights():
                work = msg.Work(
                    decode_steps=1,
                    generated_tokens=1,
                    prefill_tokens=1,
                    preemptions=0,
                    cpu_s=0.0,
                    decode_cpu_s=0.0,
                )
                report = msg.WeightsLoaded(version=command.version, work=work)
                self._later(now, worker, report)
            case _:
                pass

    def _later(self, when: float, worker: int, what: Any) -> None:
        heapq.heappush(self._agenda, (when, next(self._order), worker, what))

    def serve(self, rewards: Rewards) -> None:
        """Report what is due, a message each turn of the loop, as fast as grading follows."""
        with self._apart:
            waits = len(rewards.pending()) > UNGRADED or not self._agenda
        if waits:
            asyncio.get_running_loop().call_later(5e-3, self.serve, rewards)
            return
        with self._apart:
            self._clock.now, _, worker, what = heapq.heappop(self._agenda)
            report = self._report(what, self._clock.now)
            data = encode(report) if report is not None else None
        if data is not None:
            self._dispatch(worker, pickle.loads(data))
        asyncio.get_running_loop().call_soon(self.serve, rewards)

    def _report(self, what: Any, when: float) -> Any:
        if isinstance(what, Request):
            held = self._running.get(what.attempt)
            if held is None or held[0] is not what:
                return None
            return msg.Finished(outputs=[self._end(what, length_of(what.seed))])
        if isinstance(what, tuple):
            outputs: list[Output] = []
            for attempt in what:
                if attempt in self._running:
                    request, began = self._running[attempt]
                    tokens = len(request.generated) + int((when - began) / TOKEN_S)
                    outputs.append(self._end(request, tokens, aborted=True))
            return msg.Aborted(outputs=outputs)
        return what

    def _end(self, request: Request, length: int, *, aborted: bool = False) -> Output:
        del self._running[request.attempt]
        self.responses += not aborted
        self.tokens += length
        at = request.seed % (len(self._corpus) - CAP)
        ended = "length" if length == CAP else "stop"
        return Output(
            attempt=request.attempt,
            tokens=self._corpus[at : at + length],
            logprobs=np.full(length, -0.5, np.float32),
            finish_reason="abort" if aborted else ended,
            weights_version=0,
        )


def length_of(seed: int) -> int:
    return max(1, min(CAP, int(random.Random(seed).lognormvariate(math.log(MEDIAN), SIGMA))))


def tokenizer_and_corpus() -> tuple[PreTrainedTokenizerFast, Any]:
    """A byte-level BPE of 4,096 tokens, and this repository's documentation in them."""
    docs = sorted((Path(__file__).parents[2] / "docs").glob("*.md"))
    texts = [path.read_text(encoding="utf-8") for path in docs]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=4096,
        show_progress=False,
        special_tokens=["<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    corpus = np.array([i for text in texts for i in tokenizer.encode(text).ids], np.int32)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    return fast, np.tile(corpus, 1 + 4 * CAP // len(corpus))


def problems_of(count: int, corpus: Any) -> Problems:
    rows = [
        Row(id=PromptId(f"p{i}"), prompt=f"Question {i}", answer="1", domain="all", columns={})
        for i in range(count)
    ]
    tokens = {row.id: corpus[i : i + 100] for i, row in enumerate(rows)}
    prompts = [Prompt(id=row.id, domain=row.domain, tokens=100) for row in rows]
    return Problems(rows, tokens, PromptSource(prompts, 0))
