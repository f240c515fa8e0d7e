"""The built-in engine: schedules, runs the rows, and processes the samples."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numba import njit

from rollpacker.config import MiniEngineConfig
from rollpacker.config.rollout import KV_SHARE
from rollpacker.core.types import AttemptId, FinishReason
from rollpacker.engine.base import (
    EngineInfo,
    EngineStats,
    Floats,
    Ints,
    Output,
    Request,
    Speculation,
    StopWatcher,
    check_request,
    stops_of,
)
from rollpacker.engine.drafts import Drafter, Drafts, Speculator
from rollpacker.engine.latency import (
    NONE,
    ON_A_CPU,
    ON_A_GPU,
    SHORT_STEPS,
    STEPS,
    Contexts,
    decode_ahead,
    measure_steps,
)
from rollpacker.engine.mini.cpu.runner import CpuRunner
from rollpacker.engine.mini.runner import Runner, Shape, TokenRows, copy_weights, shape_of
from rollpacker.engine.mini.schedule import Blocks, Held, Joining, SequenceScheduler, Slots
from rollpacker.engine.mini.torch_runner import TorchRunner
from rollpacker.engine.sampling.race import RowDraws

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


class SlotSpeculator(Speculator):
    """Drafts for the scheduler's running sequences, as rows of a step. If ``equal``, all sequences
    of a step verify the same number of tokens."""

    def __init__(
        self, slots: Slots, scheduler: SequenceScheduler, drafter: Drafter, *, equal: bool
    ) -> None:
        running = scheduler.running
        super().__init__(slots, lambda slot: running[slot].request.group, drafter)
        self._slots = slots
        self._scheduler = scheduler
        self._equal = equal
        self._every = np.arange(len(slots.count), dtype=np.int32)

    def of_step(self, slots: Ints) -> tuple[Drafts, Ints] | None:
        """Drafts for the coming step, and the tokens of each to verify (b,). None for a plain
        step."""
        if not self.due(len(slots)):
            return None
        s = self._slots
        most = np.empty(len(slots), np.int32)
        if _look(slots, (s.prompt, s.count, s.limit, s.room), self.how.most, most):
            most = self._scheduler.reach(slots, most)
        drafts = self.draft(slots, most)
        if drafts is None or not self._equal:
            return None if drafts is None else (drafts, drafts.lengths)
        same = min(int(drafts.lengths.max()), int(most.min()))
        past = np.arange(drafts.tokens.shape[1]) >= drafts.lengths[:, None]
        drafts.tokens[past] = 0
        padded = np.full(len(slots), same, np.int32)
        cut = Drafts(drafts.tokens, drafts.buckets, np.minimum(drafts.lengths, padded))
        return (cut, padded) if same else None

    def rows(self, slots: Ints, drafts: Drafts, verified: Ints) -> tuple[TokenRows, Ints]:
        """Each slot's last token and its draft, and each row's distance from the slot's next
        token."""
        s = self._slots
        n = len(slots) + int(verified.sum())
        tokens, positions, of, ahead = np.empty((4, n), np.int32)
        told = s.token, s.prompt, s.count
        _rows(slots, told, drafts.tokens, verified, (tokens, positions, of, ahead))
        if n > len(self._every):
            self._every = np.arange(2 * n, dtype=np.int32)
        return TokenRows(tokens, positions, of, self._every[:n]), ahead

    def settle(
        self, slots: Ints, drafts: Drafts, verified: Ints, tokens: Ints, logprobs: Floats
    ) -> tuple[Ints, Ints]:
        right, stopped, full = self._slots.settle(slots, drafts.tokens, verified, tokens, logprobs)
        self.judge(drafts, right)
        return stopped, full


@njit(cache=True, nogil=True)
def _look(slots: Any, spans: Any, cap: int, most: Any) -> int:
    prompts, counts, limits, rooms = spans
    lacking = 0
    for i in range(len(slots)):
        slot = slots[i]
        most[i] = min(cap, limits[slot] - counts[slot] - 1)
        lacking += prompts[slot] + counts[slot] + most[i] > rooms[slot]
    return lacking


@njit(cache=True, nogil=True)
def _rows(slots: Any, told: Any, drafts: Any, lengths: Any, out: Any) -> None:
    last, prompts, counts = told
    tokens, positions, of, ahead = out
    row = 0
    for i in range(len(slots)):
        slot = slots[i]
        for j in range(lengths[i] + 1):
            tokens[row] = last[slot] if j == 0 else drafts[i, j - 1]
            positions[row] = prompts[slot] + counts[slot] - 1 + j
            of[row], ahead[row] = slot, j
            row += 1


_MEASURED = (1, 4, 16, 32, 64)
_SMALL = 5e6  # parameters below which a model's steps are short


class MiniEngine:
    """Continuous batching with blocked KV over a transformers model that it shares.

    On a CPU, numba kernels read packed copies of the weights. ``load_weights`` refreshes these. So
    does an admission after autograd's version counters show that a parameter was written in place
    (``fused=True`` optimizers do not count). On other devices torch reads the model's own tensors.

    Args:
        model: Qwen2, Qwen3 or Llama causal language model. Only ``load_weights`` modifies it.
        tokenizer: needed only for stop strings.
        deterministic: results do not depend on the batch, bit by bit. Always so on a CPU.
        sharers: processes that share the device's memory, this one among them.

    Raises ``ValueError`` for an architecture or block size that it cannot run.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        config: MiniEngineConfig,
        tokenizer: Any = None,
        deterministic: bool = False,
        runner: Runner | None = None,
        drafter: Drafter | None = None,
        sharers: int = 1,
    ) -> None:
        self._model = model
        self._shape = shape_of(model)
        self._tokenizer = tokenizer
        self._runner = runner or _runner(model, self._shape, config.block_size, deterministic)
        self._blocks = Blocks(_capacity(config, self._runner, self._shape.context, sharers))
        self._slots = Slots(config.max_running, self._shape.context, self._runner.block_size)
        self._scheduler = SequenceScheduler(self._slots, self._blocks, self._runner.block_size)
        self._speculator = SlotSpeculator(
            self._slots, self._scheduler, drafter or Drafter(), equal=self._runner.equal_rows
        )
        self._version = self._steps = self._generated = self._prefilled = self._rows = 0
        self._runner.allocate(self._blocks.count)

    def info(self) -> EngineInfo:
        kv_tokens = self._blocks.count * self._runner.block_size
        long = self._contexts().within(self._room, kv_tokens, len(self._slots.tables))
        steps = SHORT_STEPS if self._model.num_parameters() < _SMALL else STEPS
        steps = min(steps, max(1, self._room // 2 - 2))
        context = min(128, self._room // 2)
        measured = measure_steps(self, _MEASURED, context, long, steps=steps)
        decode_ahead(self, self._room)
        self._speculator.turn_over()
        return EngineInfo(
            kv_tokens=kv_tokens,
            max_length=self._room,
            tensor_parallel=(1,),
            latency=measured.decode,
            prefill_token_s=measured.prefill_token_s,
            exact_seeds=self._runner.exact,
            context_token_s=measured.context_token_s,
            speculates=True,
        )

    def _contexts(self) -> Contexts:
        if next(self._model.parameters()).device.type == "cpu":
            return ON_A_CPU
        # An exact runner runs each token of a prompt alone: a few thousand take minutes.
        return NONE if self._runner.exact else ON_A_GPU

    @property
    def _room(self) -> int:
        return min(self._shape.context, self._blocks.count * self._runner.block_size)

    def submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._check(request)
        for request in requests:
            stops = stops_of(request)
            watcher = StopWatcher(self._tokenizer, stops, request.turn_start) if stops else None
            self._scheduler.add(request, watcher)
            self._speculator.hear(request)

    def speculate(self, how: Speculation) -> None:
        self._speculator.follow(how)

    def step(self) -> list[Output]:
        if not self.busy():
            return []
        decoding, admitted = self._scheduler.schedule()
        if admitted:  # only now, as a running sequence's KV belongs to the weights that made it
            self._runner.refresh()
        if not admitted and (found := self._speculator.of_step(decoding)) is not None:
            return self._verify(decoding, *found)
        hidden, slots, rows = self._run(decoding, admitted)
        tokens, logprobs = self._sample(hidden, slots, rows)
        self._generated += len(slots)
        return self._postprocess(*self._slots.append(slots, tokens, logprobs))

    def _verify(self, slots: Ints, drafts: Drafts, verified: Ints) -> list[Output]:
        rows, ahead = self._speculator.rows(slots, drafts, verified)
        self._rows += len(rows.tokens)
        hidden = self._runner.forward(rows, self._slots.tables)
        tokens, logprobs = self._sample(hidden, rows.slots, rows.keep, ahead)
        before = self._slots.count[slots]
        stopped, full = self._speculator.settle(slots, drafts, verified, tokens, logprobs)
        outputs = self._postprocess(stopped, full)
        self._generated += int((self._slots.count[slots] - before).sum())
        return outputs

    def abort(self, attempts: Collection[AttemptId]) -> list[Output]:
        held = self._scheduler.held
        known = [held[a] for a in attempts if a in held]
        for attempt in attempts:
            self._scheduler.parked.drop(attempt)
        return [self._finish(sequence, "abort") for sequence in known]

    def load_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]] | None, version: int
    ) -> None:
        if self.busy():
            raise RuntimeError("weights cannot change while attempts are held: abort them first")
        self._scheduler.parked.clear()
        if weights is not None:
            copy_weights(self._model, weights)
        self._runner.refresh(force=True)
        self._speculator.turn_over()
        self._version = version

    def sleep(self) -> None:
        assert not self.busy()
        self._scheduler.parked.clear()
        self._runner.release()

    def wake(self) -> None:
        self._runner.allocate(self._blocks.count)

    def close(self) -> None:
        self._runner.release()

    def busy(self) -> bool:
        return bool(self._scheduler.held)

    def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self._scheduler.running),
            waiting=self._scheduler.waiting,
            kv_used=1.0 - (self._blocks.free + self._blocks.spare) / self._blocks.count,
            preemptions=self._scheduler.preemptions,
            steps=self._steps,
            generated_tokens=self._generated,
            prefill_tokens=self._prefilled,
            cached_tokens=self._scheduler.cached,
            rows=self._rows,
        )

    def _check(self, request: Request) -> None:
        self._scheduler.check(request)
        check_request(
            request,
            room=self._room,
            vocabulary=self._shape.vocabulary,
            decodes=self._tokenizer is not None,
        )

    def _run(self, decoding: Ints, admitted: list[Joining]) -> tuple[Any, Ints, Ints]:
        s = self._slots
        positions = s.prompt[decoding] + s.count[decoding] - 1
        every = np.arange(len(decoding), dtype=np.int32)
        if not admitted:
            self._rows += len(decoding)
            rows = TokenRows(s.token[decoding], positions, decoding, every)
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
            rows = TokenRows(tokens, positions, slots, np.array(keep, np.int32))
            hidden = self._runner.forward(rows, s.tables)
        return self._spread(decoding, running, admitted, hidden)

    def _prefill(self, admission: Joining) -> tuple[Ints, Ints, Ints]:
        sequence, start = admission.sequence, admission.start
        context = np.concatenate([sequence.request.prompt, sequence.tokens])[start:]
        positions = np.arange(start, start + len(context), dtype=np.int32)
        return context, positions, np.full(len(context), sequence.slot, np.int32)

    def _spread(
        self, decoding: Ints, running: list[Joining], admitted: list[Joining], hidden: Any
    ) -> tuple[Any, Ints, Ints]:
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

    def _sample(
        self, hidden: Any, slots: Ints, rows: Ints, ahead: Ints | int = 0
    ) -> tuple[Ints, Floats]:
        s = self._slots
        draws = RowDraws(
            s.temperature[slots],
            s.top_k[slots],
            s.top_p[slots],
            s.draw_uniforms(slots, ahead),
        )
        return self._runner.sample(hidden, rows, draws)

    def _postprocess(self, stopped: Ints, full: Ints) -> list[Output]:
        self._steps += 1
        running = self._scheduler.running
        watched = [s for s in running.values() if s.watcher and self._cut(s, s.watcher)]
        over = {int(slot): running[int(slot)] for slot in stopped}
        over |= {sequence.slot: sequence for sequence in watched}
        outputs = [self._finish(sequence, "stop") for sequence in over.values()]
        outputs += [
            self._finish(running[int(slot)], "length") for slot in full if int(slot) in running
        ]
        return outputs

    def _cut(self, sequence: Held, watcher: StopWatcher) -> bool:
        slot = sequence.slot
        tokens = self._slots.text(slot)[self._slots.prompt[slot] :]
        # Token by token, since a draft may have added several.
        for count in range(max(watcher.seen, len(sequence.request.generated)) + 1, len(tokens) + 1):
            if watcher.found(tokens[:count]):
                self._slots.count[slot] = count
                return True
        return False

    def _finish(self, sequence: Held, reason: FinishReason) -> Output:
        if sequence.slot >= 0:
            self._speculator.ended(sequence.slot)
        tokens, logprobs = self._scheduler.remove(sequence, ended=reason != "abort")
        return Output(
            attempt=sequence.request.attempt,
            tokens=tokens,
            logprobs=logprobs,
            finish_reason=reason,
            weights_version=self._version,
            drafts=sequence.drafts,
        )


def _runner(model: PreTrainedModel, shape: Shape, block_size: int, deterministic: bool) -> Runner:
    if next(model.parameters()).device.type == "cpu":
        if block_size != CpuRunner.block_size:
            fix = f"on a CPU a block has {CpuRunner.block_size} tokens, so leave it out"
            raise ValueError(f"engine.block_size={block_size}: {fix}")
        return CpuRunner(model, shape)
    return TorchRunner(model, shape, block_size=block_size, deterministic=deterministic)


def _capacity(config: MiniEngineConfig, runner: Runner, context: int, sharers: int) -> int:
    size = runner.block_size
    if config.kv_tokens:
        return max(1, config.kv_tokens // size)
    wanted = config.max_running * -(-context // size)
    return max(1, min(wanted, runner.free_bytes(sharers) // KV_SHARE // runner.kv_bytes()))
