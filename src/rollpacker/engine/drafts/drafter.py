"""What drafts are learnt from, the texts that the engine has seen, and how often they are right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from zlib import crc32

import numpy as np
from numba import njit
from numpy.typing import NDArray

from rollpacker.core.types import PromptId
from rollpacker.engine.base import Ints
from rollpacker.engine.drafts.draft_table import (
    BUCKETS,
    LENGTHS,
    LONGEST,
    draft,
    learn,
    new_table,
)

_FIRST, _MOST = 1 << 16, 1 << 22
"""Entries of the first generation and of those after some: 34 MB, 400,000 tokens in one scope."""
_KEPT = 1 << 19
"""Most tokens of finished responses that wait to be learnt for all groups."""
_FORGET = 0.5
"""What counts of acceptance under the last weights: texts change slowly, and what was never right
is tried again."""
_EVERYWHERE = np.uint64(0)

Scopes = NDArray[np.uint64]


class Drafter:
    """Tables of what followed what, and how often each kind of entry was right.

    A text is learnt when somebody drafts: that of the group's members and its hints under the
    group's scope, and those of past rounds, whosever they are, under one for all.

    Args:
        entries: of the largest tables, a power of two.
    """

    def __init__(self, entries: int = _MOST) -> None:
        self._entries = entries
        self._young, self._old = new_table(min(_FIRST, entries)), new_table(1)
        self._new: list[tuple[np.uint64, Ints, int]] = []
        self._round: list[Ints] = []
        self._past: list[Ints] = []
        self._known: set[int] = set()
        self._tried = np.full(BUCKETS, 2.0)
        self._right = np.full(BUCKETS, 1.0)

    def scope(self, group: PromptId) -> np.uint64:
        """A group's own, never that of all."""
        return np.uint64(crc32(group.encode()) + 1)

    def first_of(self, scope: np.uint64) -> bool:
        """Whether a group is new, so that its prompt has to be learnt; it is not from now on."""
        new = int(scope) not in self._known
        self._known.add(int(scope))
        return new

    def ended(self, scope: np.uint64, text: Ints, start: int) -> None:
        """A sequence is over: its ``text`` from ``start`` is not learnt yet."""
        self._new.append((scope, text, start))

    def hint(self, scope: np.uint64, texts: Sequence[Ints]) -> None:
        """Responses to the same prompt that others sampled."""
        self._new += [(scope, text, 0) for text in texts]

    def turn_over(self) -> None:
        """The weights change: responses of the round are what all groups may learn from."""
        self._past += self._round + [text for _, text, _ in self._new]
        self._round.clear()
        self._new.clear()
        self._known.clear()
        room = _KEPT
        for place in range(len(self._past) - 1, -1, -1):
            room -= len(self._past[place])
            if room < 0:
                del self._past[: place + 1]
                break
        self._tried = 2.0 + _FORGET * (self._tried - 2.0)
        self._right = 1.0 + _FORGET * (self._right - 1.0)

    def catch_up(self) -> None:
        """Learn what has ended."""
        if not (self._past or self._new):
            self._make_room()
            return
        for text in self._past:
            self._learn(_EVERYWHERE, text, 0)
        self._past.clear()
        for scope, text, start in self._new:
            self._learn(scope, text, start)
            self._round.append(text)
        self._new.clear()
        self._make_room()

    def _learn(self, scope: np.uint64, text: Ints, start: int) -> None:
        self._make_room()
        learn(self._young, scope, text, start, len(text))

    def _make_room(self) -> None:
        entries = len(self._young.entries)
        if 2 * int(self._young.used[0]) > entries:
            self._old, self._young = self._young, new_table(min(4 * entries, self._entries))

    def draft(
        self,
        scopes: Scopes,
        texts: Ints,
        rows: Ints,
        spans: tuple[Ints, Ints, Ints],
        most: Ints,
        least: tuple[int, float],
        stops: Ints,
    ) -> tuple[Ints, Ints, Ints]:
        """Learn what is new in running sequences, and draft what may come next.

        Args:
            scopes: of each row of ``texts``.
            texts: prompts and responses, (slots, context).
            rows: those that draft, (b,).
            spans: of every row, up to where it was learnt, which is moved on, and how long its
                prompt and its response are.
            most: tokens of each draft, (b,).
            least: tokens of a draft that cost nothing, and the probability with which another
                one is to be reached.
            stops: (slots, S) tokens that end a response.

        Returns drafts and their buckets, each (b, k), and their lengths (b,).
        """
        width = max(1, int(most.max(initial=0)))
        drafts, buckets = np.empty((2, len(rows), width), np.int32)
        lengths = np.empty(len(rows), np.int32)
        tables = self._young, self._old
        told = most, least, self._right / self._tried
        _draft(tables, scopes, texts, rows, spans, told, stops, (drafts, buckets, lengths))
        return drafts, buckets, lengths

    def judge(self, buckets: Ints, lengths: Ints, right: Ints) -> None:
        """Take what became of drafts: the first ``right`` of each were, the next one was not."""
        _judge(buckets, lengths, right, self._tried, self._right)


@njit(cache=True, nogil=True)
def _draft(
    tables: Any,
    scopes: Any,
    texts: Any,
    rows: Any,
    spans: Any,
    told: Any,
    stops: Any,
    out: Any,
) -> None:
    learnt, prompts, counts = spans
    most, least, rates = told
    drafts, buckets, lengths = out
    for row in rows:
        end = prompts[row] + counts[row]
        learn(tables[0], scopes[row], texts[row], learnt[row], end)
        learnt[row] = end
    room = (
        np.empty(LONGEST + drafts.shape[1], np.int32),
        np.empty((2, len(LENGTHS)), np.uint64),
    )
    for i in range(len(rows)):
        row = rows[i]
        lengths[i] = draft(
            tables,
            scopes[row],
            texts[row],
            learnt[row],
            most[i],
            least,
            rates,
            stops[row],
            room,
            drafts[i],
            buckets[i],
        )


@njit(cache=True, nogil=True)
def _judge(buckets: Any, lengths: Any, right: Any, tried: Any, accepted: Any) -> None:
    for i in range(len(lengths)):
        for j in range(min(lengths[i], right[i] + 1)):
            tried[buckets[i, j]] += 1.0
            if j < right[i]:
                accepted[buckets[i, j]] += 1.0
