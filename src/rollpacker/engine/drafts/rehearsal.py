"""What decoding ahead would have brought on responses that somebody else sampled."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from rollpacker.core.types import PromptId
from rollpacker.engine.base import Ints
from rollpacker.engine.drafts.drafter import Drafter
from rollpacker.policy.engines.speculation import MOST

_LEFT = 8
"""Responses that still run where drafting begins."""
_TAIL = 4
"""A quarter of the longest is looked at where many end together."""


class Rehearsal:
    """Decodes the response that ends each step again, with drafts that its engine could have made.

    As in ``MiniEngine`` they come from the prompt's other responses, as far as these were, from its
    last visit and from all of the steps before, as if one engine had sampled everything. A token is
    drafted where it is likely, whatever a row costs.
    """

    def __init__(self) -> None:
        self._drafter = Drafter()
        self._visits: dict[PromptId, Sequence[Ints]] = {}
        self.decoded = self.steps = self.verified = self.drafted = 0

    @property
    def tokens(self) -> float:
        """Of a decode step, one without a draft too; 1 where there was none."""
        return self.decoded / self.steps if self.steps else 1.0

    @property
    def draft(self) -> int:
        """Tokens of a draft, rounded up, at least 1."""
        return max(1, math.ceil(self.drafted / max(1, self.verified)))

    def step(self, groups: Mapping[PromptId, Sequence[Ints]]) -> None:
        """The next training step: token ids of every response, by prompt."""
        lengths = sorted(len(text) for texts in groups.values() for text in texts)
        if lengths and lengths[-1]:
            last = max(groups, key=lambda prompt: max(map(len, groups[prompt]), default=0))
            begin = lengths[-_LEFT - 1] if len(lengths) > _LEFT else 0
            begin = min(begin, lengths[-1] - lengths[-1] // _TAIL)
            self._decode(last, sorted(groups[last], key=len, reverse=True), begin)
        for prompt, texts in groups.items():
            for text in texts:
                self._drafter.ended(self._drafter.scope(prompt), text, 0)
        self._drafter.turn_over()
        self._visits |= groups

    def _decode(self, prompt: PromptId, texts: Sequence[Ints], begin: int) -> None:
        """The first of ``texts``, from ``begin`` on; the others are as far as it is."""
        scope, ends = self._drafter.scope(prompt), np.array([len(text) for text in texts], np.int32)
        self._drafter.hint(scope, self._visits.get(prompt, ()))
        told = np.zeros((len(texts), int(ends[0])), np.int32)
        for row, text in zip(told, texts, strict=True):
            row[: len(text)] = text
        rows = np.arange(len(texts), dtype=np.int32)
        learnt, prompts, most = np.zeros((3, len(texts)), np.int32)
        at, end = begin, int(ends[0])
        while at < end:
            most[0] = min(MOST, end - at - 1)
            spans = learnt, prompts, np.minimum(ends, at).astype(np.int32)
            self._drafter.catch_up()
            drafts, buckets, lengths = self._drafter.draft(
                np.full(len(texts), scope),
                told,
                rows,
                spans,
                most,
                (MOST + 1, 0.0),
                np.empty((len(texts), 0), np.int32),
            )
            drafted = int(lengths[0])
            right = _right(drafts[0, :drafted], told[0, at:])
            self._drafter.judge(buckets[:1], lengths[:1], np.array([right], np.int32))
            self.steps += 1
            self.verified += drafted > 0
            self.drafted += drafted
            self.decoded += right + 1
            at += right + 1


def _right(draft: Ints, text: Ints) -> int:
    """Tokens of the draft before the first that is wrong."""
    wrong = np.flatnonzero(draft != text[: len(draft)])
    return int(wrong[0]) if wrong.size else len(draft)
