"""Which running sequences decode ahead in a step, and by which tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import njit

from rollpacker.engine.base import NO_SPECULATION, Request, Speculation
from rollpacker.engine.mini.drafts.drafter import Drafter
from rollpacker.engine.mini.runner import Floats, Ints, TokenRows
from rollpacker.engine.mini.scheduling.schedule import Held, SequenceScheduler
from rollpacker.engine.mini.scheduling.slots import CHUNK, Slots
from rollpacker.policy.engines.speculation import worth

_LONGEST_PAUSE = 32
"""Steps without drafts after many of which nothing was right: noise costs no more than that."""


@dataclass(frozen=True, slots=True, eq=False)
class Drafts:
    """Of a step, for the slots that decode.

    Args:
        tokens, buckets: (b, k).
        lengths: (b,) tokens that were drafted.
        padded: (b,) tokens to verify: some runners want as many of each.
    """

    tokens: Ints
    buckets: Ints
    lengths: Ints
    padded: Ints


class Speculator:
    """Drafts for the scheduler's running sequences as it is told to.

    Args:
        slots: their texts.
        scheduler: has the blocks that drafts may take.
        drafter: makes them.
        equal: all drafts of a step have to be of one length.
    """

    def __init__(
        self, slots: Slots, scheduler: SequenceScheduler, drafter: Drafter, *, equal: bool
    ) -> None:
        self._slots = slots
        self._scheduler = scheduler
        self._equal = equal
        self._how = NO_SPECULATION
        self._drafter = drafter
        count = len(slots.count)
        self._met = np.zeros(count, np.int64)
        self._scopes = np.zeros(count, np.uint64)
        self._learnt = np.zeros(count, np.int32)
        self._misses = self._pause = 0
        self._every = np.arange(count, dtype=np.int32)

    def follow(self, how: Speculation) -> None:
        """Draft so from now on. Raises ``ValueError`` for drafts that are too long."""
        if how.most >= CHUNK:
            raise ValueError(f"drafts have at most {CHUNK - 1} tokens, not {how.most}")
        self._how = how
        self._misses = self._pause = 0

    def turn_over(self) -> None:
        """The weights change."""
        self._how = NO_SPECULATION
        self._drafter.turn_over()

    def hear(self, request: Request) -> None:
        """Texts that come with a request are for all of its group."""
        if request.hints:
            self._drafter.hint(self._drafter.scope(request.group), request.hints)

    def ended(self, sequence: Held) -> None:
        """A running sequence is about to be let go of."""
        if not self._how.below:
            return
        slot = sequence.slot
        known = self._met[slot] == self._slots.ticket[slot]
        scope = self._drafter.scope(sequence.request.group)
        start = int(self._learnt[slot]) if known else int(self._slots.prompt[slot])
        self._drafter.ended(scope, self._slots.text(slot).copy(), start)

    def draft(self, slots: Ints) -> Drafts | None:
        """What to verify of these in the coming step; None: decode a token of each."""
        how, b = self._how, len(slots)
        if b > how.below:
            return None
        if self._pause:
            self._pause -= 1
            return None
        s = self._slots
        most = np.empty(b, np.int32)
        spans = (s.prompt, s.count, s.limit, s.room)
        lacking, new = _look(slots, spans, (s.ticket, self._met), how.most, most)
        if lacking:
            most = self._scheduler.reach(slots, most)
        if new:
            for slot in slots[self._met[slots] != s.ticket[slots]]:
                self._meet(int(slot))
        self._drafter.catch_up()
        tokens, buckets, lengths = self._drafter.draft(
            self._scopes,
            s.texts,
            slots,
            (self._learnt, s.prompt, s.count),
            most,
            worth(b, how.free, how.row_cost),
            s.stops,
        )
        if not lengths.any():
            self._missed()
            return None
        if not self._equal:
            return Drafts(tokens, buckets, lengths, lengths)
        same = min(int(lengths.max()), int(most.min()))
        tokens[np.arange(tokens.shape[1]) >= lengths[:, None]] = 0
        padded = np.full(b, same, np.int32)
        return Drafts(tokens, buckets, np.minimum(lengths, padded), padded) if same else None

    def _meet(self, slot: int) -> None:
        """A sequence that has not drafted in this slot."""
        request = self._scheduler.running[slot].request
        self._met[slot] = self._slots.ticket[slot]
        scope = self._scopes[slot] = self._drafter.scope(request.group)
        first = self._drafter.first_of(scope)
        self._learnt[slot] = 0 if first else self._slots.prompt[slot]

    def rows(self, slots: Ints, drafts: Drafts) -> tuple[TokenRows, Ints]:
        """Each slot's last token and its draft, and how far ahead of the next token each row is."""
        s = self._slots
        n = len(slots) + int(drafts.padded.sum())
        tokens, positions, of, ahead = np.empty((4, n), np.int32)
        told = s.token, s.prompt, s.count
        _rows(slots, told, drafts.tokens, drafts.padded, (tokens, positions, of, ahead))
        if n > len(self._every):
            self._every = np.arange(2 * n, dtype=np.int32)
        return TokenRows(tokens, positions, of, self._every[:n]), ahead

    def settle(
        self, slots: Ints, drafts: Drafts, tokens: Ints, logprobs: Floats
    ) -> tuple[Ints, Ints]:
        """Take what was sampled of the rows; the slots that ended, as ``Slots.append``."""
        right, stopped, full = self._slots.settle(
            slots, drafts.tokens, drafts.padded, tokens, logprobs
        )
        self._drafter.judge(drafts.buckets, drafts.lengths, right)
        if right.any():
            self._misses = 0
        else:
            self._missed()
        return stopped, full

    def _missed(self) -> None:
        self._misses += 1
        self._pause = min(self._misses // 2, _LONGEST_PAUSE)


@njit(cache=True, nogil=True)
def _look(slots: Any, spans: Any, tickets: Any, cap: int, most: Any) -> tuple[int, int]:
    """How long drafts may be, of how many that is more than their blocks hold, and how many
    sequences are new in their slots."""
    prompts, counts, limits, rooms = spans
    now, met = tickets
    lacking = new = 0
    for i in range(len(slots)):
        slot = slots[i]
        most[i] = min(cap, limits[slot] - counts[slot] - 1)
        lacking += prompts[slot] + counts[slot] + most[i] > rooms[slot]
        new += now[slot] != met[slot]
    return lacking, new


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
