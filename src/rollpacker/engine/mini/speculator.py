"""Drafts of running sequences as rows of a step."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from rollpacker.engine.base import Floats, Ints
from rollpacker.engine.drafts import Drafter, Drafts, Speculator
from rollpacker.engine.mini.runner import TokenRows
from rollpacker.engine.mini.schedule import SequenceScheduler, Slots


class SlotSpeculator(Speculator):
    """Drafts for the scheduler's running sequences, as rows of a step; ``equal``: all of a step's
    sequences verify as many tokens."""

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
        """Drafts of these in the coming step, and how many tokens of each to verify (b,); None:
        decode a token of each."""
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
        """Each slot's last token and its draft, and how far ahead of the next token each row is."""
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
        """Take what was sampled of the rows; the slots that ended, as ``Slots.append``."""
        right, stopped, full = self._slots.settle(slots, drafts.tokens, verified, tokens, logprobs)
        self.judge(drafts, right)
        return stopped, full


@njit(cache=True, nogil=True)
def _look(slots: Any, spans: Any, cap: int, most: Any) -> int:
    """How long drafts may be, and of how many that is more than their blocks hold."""
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
