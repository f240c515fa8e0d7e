"""The built-in engine: schedule, run rows, book what was sampled."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from rollpacker.config import MiniEngineConfig
from rollpacker.core.types import AttemptId, FinishReason, PromptId
from rollpacker.engine.base import EngineStats, Output, Request
from rollpacker.engine.mini.blocks import Blocks, Prefix
from rollpacker.engine.mini.cpu import CpuRunner
from rollpacker.engine.mini.limits import check_request
from rollpacker.engine.mini.runner import Draws, Floats, Ints, Rows, Runner
from rollpacker.engine.mini.shape import Shape, shape_of
from rollpacker.engine.mini.slots import Slots
from rollpacker.engine.mini.stops import StopWatcher
from rollpacker.engine.mini.torch_runner import TorchRunner
from rollpacker.engine.mini.weights import copy_weights

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


@dataclass(slots=True, eq=False)
class _Sequence:
    """A held request and, while it waits, its response so far."""

    request: Request
    prefix: Prefix
    tokens: Ints
    logprobs: Floats
    slot: int = -1
    blocks: list[int] = field(default_factory=list[int])
    watcher: StopWatcher | None = None


@dataclass(slots=True, eq=False)
class _Admission:
    """What this step runs for a sequence that joins: rows from ``start``, or nothing."""

    sequence: _Sequence
    start: int
    leads: bool = False
    follows: bool = False


class MiniEngine:
    """Continuous batching with blocked KV over a transformers model that it shares.

    On a CPU, numba kernels read packed copies of the weights, refreshed by ``load_weights`` and
    whenever autograd's version counters show that a parameter was written in place (``fused=True``
    optimizers do not move these). On other devices the model's own tensors are used through torch.

    Args:
        model: Qwen2, Qwen3 or Llama causal language model; never modified but by
            ``load_weights``.
        config: ``engine`` section of the run's config.
        tokenizer: decodes for stop strings; needed only for those.
        deterministic: results independent of batch composition and arrival order, bit by bit;
            always so on a CPU, where it costs nothing.
        runner: how the model runs; default: numba kernels on a CPU, torch elsewhere.
        sharers: processes like this one on the device, this one among them; a KV budget that is
            not given is found within this one's share of the memory.

    Raises ``ValueError`` for an architecture that it cannot run, and for a block size that the
    kernels for CPUs do not have.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        config: MiniEngineConfig,
        tokenizer: Any = None,
        deterministic: bool = False,
        runner: Runner | None = None,
        sharers: int = 1,
    ) -> None:
        self._model = model
        self._shape = shape_of(model)
        self._tokenizer = tokenizer
        self._runner = runner or _runner(model, self._shape, config.block_size, deterministic)
        self._most_running = config.max_running
        self._capacity = _capacity(config, self._runner, self._shape.context, sharers)
        self._blocks = Blocks(self._capacity)
        self._slots = Slots(config.max_running, self._shape.context, self._runner.block_size)
        self._waiting: deque[_Sequence] = deque()
        self._running: dict[int, _Sequence] = {}
        self._free_slots = list(range(config.max_running - 1, -1, -1))
        self._active = np.zeros(0, np.int32)
        self._prefixes: dict[PromptId, Prefix] = {}
        self._held: dict[AttemptId, _Sequence] = {}
        self._version = 0
        self._preemptions = self._steps = self._generated = self._prefilled = 0
        self._runner.allocate(self._capacity)

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests. Raises ``ValueError`` if one can never fit or has no tokenizer."""
        for request in requests:
            self._check(request)
        for request in requests:
            prefix = self._prefixes.get(request.group)
            if prefix is None:
                prefix = self._prefixes[request.group] = Prefix(request.prompt)
            prefix.members += 1
            sequence = _Sequence(request, prefix, request.generated, request.logprobs)
            if request.params.stop and not request.params.ignore_stop:
                sequence.watcher = StopWatcher(self._tokenizer, request.params.stop)
            self._held[request.attempt] = sequence
            self._waiting.append(sequence)

    def step(self) -> list[Output]:
        """Admit what fits, decode one token for every running sequence, return what finished."""
        if not self._held:
            return []
        self._runner.refresh()
        decoding = self._grow()
        hidden, slots, rows = self._forward(decoding, self._admit())
        tokens, logprobs = self._sample(hidden, slots, rows)
        self._steps += 1
        self._generated += len(slots)
        stopped, full = self._slots.append(slots, tokens, logprobs)
        outputs = [self._finish(self._running[int(slot)], "stop") for slot in stopped]
        outputs += [self._finish(s, "stop") for s in self._watched()]
        outputs += [
            self._finish(self._running[int(slot)], "length")
            for slot in full
            if int(slot) in self._running
        ]
        return outputs

    def abort(self, attempts: Collection[AttemptId]) -> list[Output]:
        """Remove attempts and return their partial outputs; unknown ids are ignored."""
        known = [self._held[a] for a in attempts if a in self._held]
        return [self._finish(sequence, "abort") for sequence in known]

    def load_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]] | None, version: int
    ) -> None:
        """Take new weights, by the checkpoint's names; None when they are shared in-process.

        Raises ``RuntimeError`` when attempts are held, ``ValueError`` on names not the model's.
        """
        if self._held:
            raise RuntimeError("weights cannot change while attempts are held: abort them first")
        if weights is not None:
            copy_weights(self._model, weights)
        self._runner.refresh(force=True)
        self._version = version

    def sleep(self) -> None:
        """Give the KV cache's memory back; nothing may be held."""
        assert not self._held
        self._runner.release()

    def wake(self) -> None:
        """Allocate the KV cache again."""
        self._runner.allocate(self._capacity)

    def busy(self) -> bool:
        """Whether anything is running or waiting."""
        return bool(self._held)

    def stats(self) -> EngineStats:
        """Counters and load."""
        return EngineStats(
            running=len(self._running),
            waiting=len(self._waiting),
            kv_used=1.0 - self._blocks.free / self._capacity,
            preemptions=self._preemptions,
            steps=self._steps,
            generated_tokens=self._generated,
            prefill_tokens=self._prefilled,
        )

    def _check(self, request: Request) -> None:
        params = request.params
        if request.attempt in self._held:
            raise ValueError(f"attempt {request.attempt} is already held")
        room = min(self._shape.context, self._capacity * self._runner.block_size)
        check_request(request, room, self._shape.vocabulary)
        if params.stop and not params.ignore_stop and self._tokenizer is None:
            raise ValueError("rollout.stop needs the model's tokenizer")
        prefix = self._prefixes.get(request.group)
        if prefix is not None and not np.array_equal(prefix.prompt, request.prompt):
            raise ValueError(f"group {request.group!r} has two different prompts")

    def _grow(self) -> Ints:
        """Give every running sequence a block for its next token; returns their slots."""
        s, size = self._slots, self._runner.block_size
        slots = self._active
        at = s.prompt[slots] + s.count[slots] - 1
        for slot in slots[at % size == 0]:
            sequence = self._running.get(int(slot))
            if sequence is not None and self._make_room(sequence):
                self._give(sequence, self._blocks.take(1))
        return self._active

    def _make_room(self, sequence: _Sequence) -> bool:
        """Free a block, preempting the latest admitted; whether ``sequence`` still runs."""
        while not self._blocks.free:
            if not self._evict():
                self._preempt(next(reversed(self._running.values())))
        return sequence.slot >= 0

    def _evict(self) -> bool:
        """Forget one cached prefix; whether there was one."""
        for prefix in self._prefixes.values():
            if prefix.cached:
                prefix.forget(self._blocks)
                return True
        return False

    def _preempt(self, sequence: _Sequence) -> None:
        """Throw a sequence out; it is recomputed when there is room again."""
        sequence.tokens, sequence.logprobs = self._slots.response(sequence.slot)
        self._leave(sequence)
        self._waiting.appendleft(sequence)
        self._preemptions += 1

    def _leave(self, sequence: _Sequence) -> None:
        """Free a running sequence's slot and blocks."""
        del self._running[sequence.slot]
        self._free_slots.append(sequence.slot)
        self._blocks.drop(sequence.blocks)
        sequence.slot, sequence.blocks = -1, []
        self._active = np.fromiter(self._running, np.int32, len(self._running))

    def _give(self, sequence: _Sequence, blocks: list[int]) -> None:
        held = len(sequence.blocks)
        sequence.blocks += blocks
        self._slots.tables[sequence.slot, held : len(sequence.blocks)] = blocks

    def _admit(self) -> list[_Admission]:
        """Move waiting sequences, in order, into free slots while their blocks fit."""
        admitted: list[_Admission] = []
        while self._waiting and self._free_slots:
            admission = self._place(self._waiting[0])
            if admission is None:
                if self._running or not self._evict():
                    break
                continue
            self._waiting.popleft()
            admitted.append(admission)
        if admitted:
            self._active = np.fromiter(self._running, np.int32, len(self._running))
        return admitted

    def _place(self, sequence: _Sequence) -> _Admission | None:
        """Give a waiting sequence a slot and its blocks; None when they do not fit."""
        prefix, size = sequence.prefix, self._runner.block_size
        length = len(prefix.prompt) + len(sequence.tokens)
        fresh = len(sequence.tokens) == 0
        shared = len(prefix.blocks)
        # Each running sequence may want a block soon: admitting into those would only preempt.
        if -(-length // size) - shared > self._blocks.free - len(self._running):
            return None
        slot = sequence.slot = self._free_slots.pop()
        self._running[slot] = sequence
        self._give(sequence, self._blocks.share(prefix.blocks))
        self._give(sequence, self._blocks.take(-(-length // size) - shared))
        self._slots.fill(slot, sequence.request, sequence.tokens, sequence.logprobs)
        if fresh and prefix.tail is not None:
            return _Admission(sequence, length, follows=True)
        leads = not prefix.cached and prefix.members > 1
        if leads:
            self._cache(sequence, fresh)
        return _Admission(sequence, shared * size, leads=leads and fresh)

    def _cache(self, sequence: _Sequence, fresh: bool) -> None:
        """Let the group share this sequence's prompt blocks, and a copy of their tail."""
        prefix = sequence.prefix
        full = (len(prefix.prompt) - 1) // self._runner.block_size
        prefix.cached = True
        prefix.blocks = self._blocks.share(sequence.blocks[:full])
        if fresh and self._blocks.free:
            prefix.tail = self._blocks.take(1)[0]

    def _forward(self, decoding: Ints, admitted: list[_Admission]) -> tuple[Any, Ints, Ints]:
        """Run the step's rows: hidden states, the slots that sample, and the row of each."""
        s = self._slots
        positions = s.prompt[decoding] + s.count[decoding] - 1
        every = np.arange(len(decoding), dtype=np.int32)
        if not admitted:
            rows = Rows(s.token[decoding], positions, decoding, every)
            return self._runner.forward(rows, s.tables), decoding, every
        parts = [(s.token[decoding], positions, decoding)]
        keep, end = every.tolist(), len(decoding)
        running = [a for a in admitted if not a.follows]
        for admission in running:
            parts.append(self._prefill(admission))
            end += len(parts[-1][0])
            keep.append(end - 1)
        columns = zip(*parts, strict=True)
        tokens, positions, slots = (np.concatenate(c).astype(np.int32) for c in columns)
        self._prefilled += end - len(decoding)
        hidden: Any = None
        if end:
            rows = Rows(tokens, positions, slots, np.array(keep, np.int32))
            hidden = self._runner.forward(rows, s.tables)
        return self._spread(decoding, running, admitted, hidden)

    def _prefill(self, admission: _Admission) -> tuple[Ints, Ints, Ints]:
        sequence, start = admission.sequence, admission.start
        context = np.concatenate([sequence.request.prompt, sequence.tokens])[start:]
        positions = np.arange(start, start + len(context), dtype=np.int32)
        return context, positions, np.full(len(context), sequence.slot, np.int32)

    def _spread(
        self, decoding: Ints, running: list[_Admission], admitted: list[_Admission], hidden: Any
    ) -> tuple[Any, Ints, Ints]:
        """Hand prefilled prompts to their group: block copies and the prompt's hidden state."""
        first = len(decoding)
        slots = [*decoding, *(a.sequence.slot for a in running)]
        rows = list(range(len(slots)))
        for row, admission in enumerate(running, first):
            prefix = admission.sequence.prefix
            if admission.leads and prefix.tail is not None:
                last = (len(prefix.prompt) - 1) // self._runner.block_size
                self._runner.copy_block(admission.sequence.blocks[last], prefix.tail)
                prefix.hidden = hidden[row : row + 1]
        parts = [] if hidden is None else [hidden]
        places: dict[int, int] = {}
        total = len(rows)
        for admission in admitted:
            if not admission.follows:
                continue
            prefix = admission.sequence.prefix
            assert prefix.tail is not None
            self._runner.copy_block(prefix.tail, admission.sequence.blocks[-1])
            if id(prefix) not in places:
                places[id(prefix)] = total
                parts.append(prefix.hidden)
                total += 1
            slots.append(admission.sequence.slot)
            rows.append(places[id(prefix)])
        joined = parts[0] if len(parts) == 1 else self._runner.join(parts)
        return joined, np.array(slots, np.int32), np.array(rows, np.int32)

    def _sample(self, hidden: Any, slots: Ints, rows: Ints) -> tuple[Ints, Floats]:
        s = self._slots
        draws = Draws(
            rows, s.draw_uniforms(slots), s.temperature[slots], s.top_k[slots], s.top_p[slots]
        )
        return self._runner.sample(hidden, draws)

    def _watched(self) -> list[_Sequence]:
        """Running sequences whose text now holds a stop string."""
        return [
            sequence
            for slot, sequence in self._running.items()
            if sequence.watcher is not None
            and sequence.watcher.found(self._slots.tokens[slot, : self._slots.count[slot]])
        ]

    def _finish(self, sequence: _Sequence, reason: FinishReason) -> Output:
        """Let go of a sequence and make its output."""
        tokens, logprobs = sequence.tokens, sequence.logprobs
        if sequence.slot >= 0:
            tokens, logprobs = self._slots.response(sequence.slot)
            self._leave(sequence)
        else:
            self._waiting.remove(sequence)
        request, prefix = sequence.request, sequence.prefix
        del self._held[request.attempt]
        prefix.members -= 1
        if not prefix.members:
            prefix.forget(self._blocks)
            del self._prefixes[request.group]
        return Output(
            attempt=request.attempt,
            tokens=tokens,
            logprobs=logprobs,
            finish_reason=reason,
            weights_version=self._version,
        )


def _runner(model: PreTrainedModel, shape: Shape, block_size: int, deterministic: bool) -> Runner:
    if next(model.parameters()).device.type == "cpu":
        if block_size != CpuRunner.block_size:
            fix = f"on a CPU a block has {CpuRunner.block_size} tokens; leave it out"
            raise ValueError(f"engine.block_size={block_size}: {fix}")
        return CpuRunner(model, shape)
    return TorchRunner(model, shape, block_size=block_size, deterministic=deterministic)


def _capacity(config: MiniEngineConfig, runner: Runner, context: int, sharers: int) -> int:
    """KV blocks of the budget."""
    size = runner.block_size
    if config.kv_tokens:
        return max(1, config.kv_tokens // size)
    wanted = config.max_running * -(-context // size)
    return max(1, min(wanted, runner.free_bytes(sharers) // 4 // runner.kv_bytes()))
