"""When running sequences decode ahead, and by which tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rollpacker.core.types import PromptId
from rollpacker.engine.base import NO_SPECULATION, Ints, Request, Speculation
from rollpacker.engine.drafts.drafter import Drafter
from rollpacker.policy.engines.speculation import worth

LONGEST_DRAFT = 63
"""Tokens; engines make that many uniforms ahead."""
_LONGEST_PAUSE = 32
"""Steps without drafts after many of which nothing was right: noise costs no more than that."""


class RunningTexts(Protocol):
    """Sequences that an engine runs, one row each.

    Attributes:
        texts: (slots, context) the prompt and, behind it, the response.
        prompt: tokens of the prompt.
        count: response tokens so far.
        stops: (slots, S) token ids that end it, filled up with -1.
        ticket: another one for each sequence that comes into a slot.
    """

    texts: Ints
    prompt: Ints
    count: Ints
    stops: Ints
    ticket: NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Drafts:
    """Of a step, for the slots that decode.

    Args:
        tokens, buckets: (b, k).
        lengths: (b,) tokens that were drafted.
    """

    tokens: Ints
    buckets: Ints
    lengths: Ints


class Speculator:
    """Guesses what an engine's running sequences go on with, as the engine is told to.

    Args:
        texts: theirs.
        group: whose response is in a slot.
        drafter: guesses.
    """

    def __init__(
        self, texts: RunningTexts, group: Callable[[int], PromptId], drafter: Drafter
    ) -> None:
        self._texts = texts
        self._group = group
        self._drafter = drafter
        self.how = NO_SPECULATION
        count = len(texts.count)
        self._met = np.zeros(count, np.int64)
        self._scopes = np.zeros(count, np.uint64)
        self._learnt = np.zeros(count, np.int32)
        self._misses = self._pause = 0

    def follow(self, how: Speculation) -> None:
        """Draft so from now on. Raises ``ValueError`` for drafts that are too long."""
        if how.most > LONGEST_DRAFT:
            raise ValueError(f"drafts have at most {LONGEST_DRAFT} tokens, not {how.most}")
        self.how = how
        self._misses = self._pause = 0

    def turn_over(self) -> None:
        """The weights change."""
        self.how = NO_SPECULATION
        self._drafter.turn_over()

    def hear(self, request: Request) -> None:
        """Texts that come with a request are for all of its group."""
        if request.hints:
            self._drafter.hint(self._drafter.scope(request.group), request.hints)

    def due(self, running: int) -> bool:
        """Whether the next step is one with drafts, of so many sequences."""
        if not 0 < running <= self.how.below:
            return False
        if self._pause:
            self._pause -= 1
            return False
        return True

    def draft(self, slots: Ints, most: Ints) -> Drafts | None:
        """What may come next of these, at most so many tokens (b,) of each; None: nothing."""
        t = self._texts
        for slot in slots[self._met[slots] != t.ticket[slots]]:
            self._meet(int(slot))
        self._drafter.catch_up()
        tokens, buckets, lengths = self._drafter.draft(
            self._scopes,
            t.texts,
            slots,
            (self._learnt, t.prompt, t.count),
            most,
            worth(len(slots), self.how.free, self.how.row_cost),
            t.stops,
        )
        if not lengths.any():
            self._missed()
            return None
        return Drafts(tokens, buckets, lengths)

    def judge(self, drafts: Drafts, right: Ints) -> None:
        """Of each draft the first so many tokens were what was sampled."""
        self._drafter.judge(drafts.buckets, drafts.lengths, right)
        if right.any():
            self._misses = 0
        else:
            self._missed()

    def ended(self, slot: int) -> None:
        """A sequence is about to leave its slot."""
        if not self.how.below:
            return
        t = self._texts
        known = self._met[slot] == t.ticket[slot]
        start = int(self._learnt[slot]) if known else int(t.prompt[slot])
        text = t.texts[slot, : t.prompt[slot] + t.count[slot]].copy()
        self.over(self._group(slot), text, start)

    def over(self, group: PromptId, text: Ints, start: int) -> None:
        """Of a group's ``text`` what is behind ``start`` is not learnt yet."""
        self._drafter.ended(self._drafter.scope(group), text, start)

    def _meet(self, slot: int) -> None:
        """A sequence that has not drafted in this slot."""
        self._met[slot] = self._texts.ticket[slot]
        scope = self._scopes[slot] = self._drafter.scope(self._group(slot))
        first = self._drafter.first_of(scope)
        self._learnt[slot] = 0 if first else self._texts.prompt[slot]

    def _missed(self) -> None:
        self._misses += 1
        self._pause = min(self._misses // 2, _LONGEST_PAUSE)
