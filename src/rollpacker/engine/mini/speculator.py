"""Which running sequences decode ahead in a step, and by which tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rollpacker.engine.base import NO_SPECULATION, Speculation
from rollpacker.engine.mini.drafter import Drafter
from rollpacker.engine.mini.runner import Floats, Ints, Rows
from rollpacker.engine.mini.schedule import Held, Scheduler
from rollpacker.engine.mini.slots import CHUNK, Slots

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
        self, slots: Slots, scheduler: Scheduler, drafter: Drafter, *, equal: bool
    ) -> None:
        self._slots = slots
        self._scheduler = scheduler
        self._equal = equal
        self._how = NO_SPECULATION
        self._drafter = drafter
        count = len(slots.count)
        self._known: list[Held | None] = [None] * count
        self._scopes = np.zeros(count, np.uint64)
        self._learnt = np.zeros(count, np.int32)
        self._misses = self._pause = 0

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

    def ended(self, sequence: Held) -> None:
        """A running sequence is about to be let go of."""
        if not self._how.below:
            return
        slot = sequence.slot
        known = self._known[slot] is sequence
        scope = self._drafter.scope(sequence.request.group)
        start = int(self._learnt[slot]) if known else int(self._slots.prompt[slot])
        self._drafter.ended(scope, self._slots.text(slot).copy(), start)
        self._known[slot] = None

    def draft(self, slots: Ints) -> Drafts | None:
        """What to verify of these in the coming step; None: decode a token of each."""
        how, b = self._how, len(slots)
        if b > how.below:
            return None
        if self._pause:
            self._pause -= 1
            return None
        self._learn(slots)
        s = self._slots
        most = np.minimum(how.most, s.limit[slots] - s.count[slots] - 1)
        reach = how.row_cost * b
        tokens, buckets, lengths = self._drafter.draft(
            self._scopes[slots],
            s.texts,
            slots,
            s.prompt[slots] + s.count[slots],
            most,
            reach / (1.0 + reach),
            s.stops[slots],
        )
        padded = self._fit(slots, tokens, lengths, most)
        if not padded.any():
            self._missed()
            return None
        return Drafts(tokens, buckets, np.minimum(lengths, padded), padded)

    def _fit(self, slots: Ints, tokens: Ints, lengths: Ints, most: Ints) -> Ints:
        """Rows of each draft that there is room for."""
        if not self._equal:
            return self._scheduler.reach(slots, lengths)
        same = min(int(lengths.max()), int(most.min()))
        if same:
            same = int(self._scheduler.reach(slots, np.full(len(slots), same, np.int32)).min())
        tokens[np.arange(tokens.shape[1]) >= lengths[:, None]] = 0
        return np.full(len(slots), same, np.int32)

    def _learn(self, slots: Ints) -> None:
        running = self._scheduler.running
        for slot in slots.tolist():
            sequence = running[slot]
            if self._known[slot] is not sequence:
                self._meet(slot, sequence)
        s = self._slots
        ends = s.prompt[slots] + s.count[slots]
        self._drafter.learn(self._scopes[slots], s.texts, slots, self._learnt[slots], ends)
        self._learnt[slots] = ends

    def _meet(self, slot: int, sequence: Held) -> None:
        self._known[slot] = sequence
        scope = self._scopes[slot] = self._drafter.scope(sequence.request.group)
        first = self._drafter.first_of(scope)
        self._learnt[slot] = 0 if first else self._slots.prompt[slot]
        self._drafter.hint(scope, sequence.request.hints)

    def rows(self, slots: Ints, drafts: Drafts) -> tuple[Rows, Ints]:
        """Each slot's last token and its draft, and how far ahead of the next token each row is."""
        s, counts = self._slots, drafts.padded + 1
        which = np.repeat(np.arange(len(slots)), counts)
        ahead = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)
        tokens = np.where(
            ahead == 0, s.token[slots][which], drafts.tokens[which, np.maximum(ahead - 1, 0)]
        )
        of = slots[which]
        positions = s.prompt[of] + s.count[of] - 1 + ahead
        every = np.arange(len(which), dtype=np.int32)
        rows = Rows(tokens.astype(np.int32), positions.astype(np.int32), of, every)
        return rows, ahead.astype(np.int32)

    def settle(
        self, slots: Ints, drafts: Drafts, tokens: Ints, logprobs: Floats
    ) -> tuple[Ints, Ints]:
        """Take what was sampled of the rows; the slots that ended, as ``Slots.append``."""
        right, stopped, full = self._slots.settle(
            slots, drafts.tokens, drafts.padded, tokens, logprobs
        )
        tried = drafts.padded > 0
        self._slots.drafts[slots] += np.stack([tried, drafts.padded, right], axis=1)
        self._drafter.judge(drafts.buckets, drafts.lengths, right)
        if right.any():
            self._misses = 0
        else:
            self._missed()
        return stopped, full

    def _missed(self) -> None:
        self._misses += 1
        self._pause = min(self._misses // 2, _LONGEST_PAUSE)
