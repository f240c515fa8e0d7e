"""Our seeds in vLLM: this module draws the tokens, and ``first_runner`` connects it to vLLM."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rollpacker.core.types import NO_DRAFTS, Drafted, PromptId
from rollpacker.engine.base import Ints, Request, StopWatcher, uniforms
from rollpacker.engine.drafts import LONGEST_DRAFT, Drafter, Drafts, Speculator
from rollpacker.engine.sampling.race import RowDraws
from rollpacker.engine.sampling.rows import draw_rows

_CHUNK = LONGEST_DRAFT + 1

Drawn = list[tuple[int, float]]


@dataclass(slots=True, eq=False)
class VllmAttempt:
    """An attempt that vLLM runs.

    Args:
        key: vLLM's name of it.
        tokens, logprobs: the response so far, earlier engines' part included.
        drawn: tokens and logprobs of the current step. vLLM drops them after a partial prefill, so
            ``tokens`` alone gives the place of the next token.
        slot: of its text among those that draft, -1 without.
    """

    request: Request
    key: str
    tokens: list[int]
    logprobs: list[float]
    watcher: StopWatcher | None
    drawn: Drawn = field(default_factory=list[tuple[int, float]])
    slot: int = -1
    drafts: Drafted = NO_DRAFTS
    _stream: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    _start: int = -1

    def uniforms(self, count: int = 1) -> NDArray[np.float64]:
        at = len(self.tokens)
        start = at - at % _CHUNK
        if start != self._start:
            self._stream, self._start = uniforms(self.request.seed, start, 2 * _CHUNK), start
        return self._stream[at - start : at - start + count]


def draw(logits: torch.Tensor, rows: Sequence[VllmAttempt], counts: Sequence[int]) -> list[Drawn]:
    """Draw tokens and logprobs for the next ``counts`` places of each row, as ``mini`` does.
    ``logits`` is (sum of counts, vocabulary)."""
    params = [row.request.params for row in rows]
    numbers = [row.uniforms(count) for row, count in zip(rows, counts, strict=True)]
    draws = RowDraws(
        temperature=np.repeat(np.array([p.temperature for p in params], np.float32), counts),
        top_k=np.repeat(np.array([p.top_k for p in params], np.int32), counts),
        top_p=np.repeat(np.array([p.top_p for p in params], np.float32), counts),
        uniform=np.concatenate(numbers),
    )
    tokens, logprobs = draw_rows(logits, draws)
    drawn = list(zip(tokens.tolist(), logprobs.tolist(), strict=True))
    ends = np.cumsum(counts).tolist()
    of_row = [drawn[end - count : end] for end, count in zip(ends, counts, strict=True)]
    for row, some in zip(rows, of_row, strict=True):
        row.drawn = some
    return of_row


def keep(row: VllmAttempt, drawn: Drawn, draft: Sequence[int]) -> Drawn:
    """The tokens that an attempt keeps: its draft's accepted tokens and the one behind them.
    ``drawn`` has one more token than the draft."""
    right = 0
    while right < len(draft) and drawn[right][0] == draft[right]:
        right += 1
    row.drawn = drawn[: right + 1]
    if draft:
        more = 1, len(draft), right
        row.drafts = Drafted(*(a + b for a, b in zip(row.drafts, more, strict=True)))
    return row.drawn


def one_hot(logits: torch.Tensor, places: Sequence[int], drawn: Sequence[Drawn]) -> torch.Tensor:
    """Leave vLLM's greedy sampler one choice in these rows, the drawn token of each."""
    tokens = [token for of_row in drawn for token, _ in of_row]
    rows, ids = torch.tensor([list(places), tokens], device=logits.device)
    logits.index_fill_(0, rows, 0.0)
    logits[rows, ids] = 1.0
    return logits


def row_of(params: Any) -> VllmAttempt:
    """The attempt of these sampling parameters."""
    return (params.extra_args or {})["row"]


_MOST_SLOTS = 256  # sequences that draft at a time


class DraftingTexts:
    """Texts of the attempts that draft, one slot each (``drafts.RunningTexts``)."""

    def __init__(self, slots: int, context: int) -> None:
        self.texts = np.zeros((slots, context), np.int32)
        self.prompt, self.count = np.zeros((2, slots), np.int32)
        self.stops = np.full((slots, 4), -1, np.int32)
        self.ticket = np.zeros(slots, np.int64)
        self.rows: dict[int, VllmAttempt] = {}
        self._free = list(range(slots))
        self._tickets = 0

    def group(self, slot: int) -> PromptId:
        return self.rows[slot].request.group

    def place(self, row: VllmAttempt) -> None:
        slot = row.slot = self._free.pop()
        self.rows[slot] = row
        self._tickets += 1
        self.ticket[slot] = self._tickets
        request, params = row.request, row.request.params
        self.prompt[slot], self.count[slot] = len(request.prompt), 0
        self.texts[slot, : len(request.prompt)] = request.prompt
        stops = () if params.ignore_stop else params.stop_token_ids
        if len(stops) > self.stops.shape[1]:
            more = len(stops) - self.stops.shape[1]
            self.stops = np.pad(self.stops, ((0, 0), (0, more)), constant_values=-1)
        self.stops[slot] = -1
        self.stops[slot, : len(stops)] = stops

    def catch_up(self, row: VllmAttempt) -> None:
        slot, count = row.slot, len(row.tokens)
        known, start = int(self.count[slot]), int(self.prompt[slot])
        self.texts[slot, start + known : start + count] = row.tokens[known:]
        self.count[slot] = count

    def leave(self, row: VllmAttempt) -> None:
        del self.rows[row.slot]
        self._free.append(row.slot)
        row.slot = -1


class VllmSpeculator(Speculator):
    """Drafts for a scheduler of vLLM, in free blocks and while no sequence waits for them."""

    def __init__(self, scheduler: Any, slots: int, context: int, drafter: Drafter) -> None:
        texts = DraftingTexts(min(slots, _MOST_SLOTS), context)
        super().__init__(texts, texts.group, drafter)
        self._own = texts
        self._scheduler = scheduler
        self._asked: list[VllmAttempt] = []
        self._drafts: Drafts | None = None

    def hand_in(self) -> None:
        if not self.how.below:
            return
        scheduler = self._scheduler
        running = scheduler.running
        decoding = all(r.num_computed_tokens + 1 == r.num_tokens for r in running)
        _, waiting = scheduler.get_request_counts()
        if waiting or not decoding or len(running) > len(self._own.count):
            return
        if not self.due(len(running)):
            return
        rows = [row_of(request.sampling_params) for request in running]
        for row in rows:
            if row.slot < 0:
                self._own.place(row)
            self._own.catch_up(row)
            row.drawn = []
        most = self._reach(running, rows)
        drafts = self.draft(np.array([row.slot for row in rows], np.int32), most)
        if drafts is None:
            return
        for request, tokens, length in zip(running, drafts.tokens, drafts.lengths, strict=True):
            request.spec_token_ids = tokens[:length].tolist()
        self._asked, self._drafts = rows, drafts

    def _reach(self, running: Iterable[Any], rows: list[VllmAttempt]) -> Ints:
        scheduler = self._scheduler
        groups = scheduler.kv_cache_config.kv_cache_groups
        block = min(group.kv_cache_spec.block_size for group in groups)
        held = [-(-request.num_computed_tokens // block) for request in running]
        needed = [-(-request.num_tokens // block) for request in running]
        free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks() // len(groups)
        free -= sum(needed) - sum(held)
        graphed = scheduler.vllm_config.compilation_config.max_cudagraph_capture_size
        # A step with more rows than a CUDA graph holds would run without the graph.
        left = min(scheduler.max_num_scheduled_tokens, graphed or sys.maxsize) - len(rows)
        most = np.zeros(len(rows), np.int32)
        for place, (row, request) in enumerate(zip(rows, running, strict=True)):
            spare = needed[place] * block - request.num_tokens
            wanted = row.request.params.max_tokens - len(row.tokens) - 1
            most[place] = max(0, min(self.how.most, wanted, left, spare + max(0, free) * block))
            free -= -(-(request.num_tokens + int(most[place])) // block) - needed[place]
            left -= int(most[place])
        return most

    def settle(self) -> None:
        drafts, self._drafts = self._drafts, None
        if drafts is None:
            return
        right = np.array([max(0, len(row.drawn) - 1) for row in self._asked], np.int32)
        self.judge(drafts, np.minimum(right, drafts.lengths))

    def gone(self, row: VllmAttempt) -> None:
        if row.slot < 0:
            if self.how.below:
                request = row.request
                text = np.concatenate([request.prompt, row.tokens]).astype(np.int32)
                self.over(request.group, text, len(request.prompt))
            return
        self._own.catch_up(row)
        self.ended(row.slot)
        self._own.leave(row)
