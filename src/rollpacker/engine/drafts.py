"""Drafts: guesses of the next tokens from texts that the engine has seen."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol
from zlib import crc32

import numpy as np
from numba import njit
from numpy.typing import NDArray

from rollpacker.core.types import PromptId
from rollpacker.engine.base import NO_SPECULATION, Ints, Request, Speculation
from rollpacker.policy.engines.speculation import MOST, worth

LENGTHS = (1, 2, 3, 5, 8)  # Tokens of a context. More than eight find nothing that these do not.
LONGEST = LENGTHS[-1]
VOTES = 4  # Most times that count. A token that came more often is as likely.
_TRIED = 0.1  # probability from which on a token is drafted that costs nothing
BUCKETS = 2 * len(LENGTHS) * VOTES
"""Kinds of entries, each with its own acceptance: scope, length of the context, votes."""


_TAG_BITS, _VOTE_BITS = np.uint64(32), np.uint64(29)
# An entry is one number, in one line of the cache: half of its key, votes, a token.
_TOKEN, _VOTE = np.uint64((1 << 29) - 1), np.uint64(7)


class DraftTable(NamedTuple):
    """One generation of entries (entries,), a power of two, of which ``used`` (1,) are taken."""

    entries: Any
    used: Any


def new_table(entries: int) -> DraftTable:
    """An empty table. It takes memory as it fills."""
    return DraftTable(np.zeros(entries, np.uint64), np.zeros(1, np.int64))


@njit(cache=True, nogil=True)
def _mix(key: Any, token: Any) -> Any:
    z = key ^ (np.uint64(token + 1) * np.uint64(0x9E3779B97F4A7C15))
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@njit(cache=True, nogil=True)
def _place(table: Any, key: Any) -> tuple[Any, Any]:
    return np.int64(key & np.uint64(len(table.entries) - 1)), key >> _TAG_BITS | np.uint64(1)


@njit(cache=True, nogil=True)
def _entry(tag: Any, votes: Any, token: Any) -> Any:
    return tag << _TAG_BITS | np.uint64(votes) << _VOTE_BITS | np.uint64(token)


@njit(cache=True, nogil=True)
def _note(table: Any, key: Any, token: int) -> None:
    at, tag = _place(table, key)
    entry = table.entries[at]
    if entry >> _TAG_BITS != tag:
        if entry == np.uint64(0):
            table.used[0] += 1
        table.entries[at] = _entry(tag, 1, token)
        return
    known, votes = np.int64(entry & _TOKEN), np.int64(entry >> _VOTE_BITS & _VOTE)
    if known == token:
        table.entries[at] = _entry(tag, min(VOTES, votes + 1), token)
    elif votes > 1:
        table.entries[at] = _entry(tag, votes - 1, known)
    else:
        table.entries[at] = _entry(tag, 1, token)


@njit(cache=True, nogil=True)
def learn(table: Any, scope: Any, text: Any, start: int, end: int) -> None:
    """Note the tokens at the places ``start`` to ``end`` of a text."""
    for t in range(max(1, start), end):
        key = scope
        level = 0
        for n in range(1, min(t, LONGEST) + 1):
            key = _mix(key, text[t - n])
            if n == LENGTHS[level]:
                _note(table, key, text[t])
                level += 1


@njit(cache=True, nogil=True)
def _find(young: Any, old: Any, own: Any, all_texts: Any) -> tuple[Any, Any]:
    """The token behind a context and its votes, plus ``VOTES`` if all texts say so, or (-1, 0)."""
    for wide in range(2):
        key = all_texts if wide else own
        for table in (young, old):
            at, tag = _place(table, key)
            entry = table.entries[at]
            if entry >> _TAG_BITS == tag:
                votes = np.int64(entry >> _VOTE_BITS & _VOTE)
                return np.int64(entry & _TOKEN), wide * VOTES + votes - 1
    return -1, 0


@njit(cache=True, nogil=True)
def _next(tables: Any, scope: Any, text: Any, end: int, keys: Any) -> tuple[int, int]:
    """The token at ``end`` and its bucket, or (-1, -1). The longest context wins."""
    young, old = tables
    own, all_texts = scope, np.uint64(0)
    levels = 0
    for n in range(1, min(end, LONGEST) + 1):
        own, all_texts = _mix(own, text[end - n]), _mix(all_texts, text[end - n])
        if n == LENGTHS[levels]:
            keys[0, levels], keys[1, levels] = own, all_texts
            levels += 1
    token, bucket = -1, -1
    if levels:  # the longest first, as it is usually there when much is drafted
        token, sure = _find(young, old, keys[0, levels - 1], keys[1, levels - 1])
        if token >= 0:
            return token, 2 * (levels - 1) * VOTES + sure
    for level in range(levels - 1):
        found, sure = _find(young, old, keys[0, level], keys[1, level])
        if found < 0:
            break  # a longer context was noted with this one
        token, bucket = found, 2 * level * VOTES + sure
    return token, bucket


@njit(cache=True, nogil=True)
def draft(
    tables: Any,
    scope: Any,
    text: Any,
    end: int,
    most: int,
    least: tuple[int, float],
    rates: Any,
    stops: Any,
    room: tuple[Any, Any],
    tokens: Any,
    buckets: Any,
) -> int:
    """Draft up to ``most`` tokens behind the first ``end`` of a text. Returns how many.

    A draft ends when its next token is unlikely to be reached, or behind a stop token. ``least``
    has the tokens that cost nothing, and the least probability of reaching a further one. ``rates``
    (``BUCKETS``,) is the share of right tokens in each bucket. ``room`` holds buffers, (``LONGEST``
    + k,) and (2, ``len(LENGTHS)``).
    """
    window, keys = room
    known = min(LONGEST, end)
    window[:known] = text[end - known : end]
    hope = 1.0
    for j in range(most):
        token, bucket = _next(tables, scope, window, known + j, keys)
        if token < 0:
            return j
        hope *= rates[bucket]
        if hope < (_TRIED if j < least[0] else least[1]):
            return j
        window[known + j] = token
        tokens[j], buckets[j] = token, bucket
        if among(stops, token):
            return j + 1
    return most


@njit(cache=True, nogil=True)
def among(tokens: Any, token: int) -> bool:
    """Whether ``token`` is one of ``tokens``."""
    for each in tokens:  # noqa: SIM110 - numba compiles no generators
        if each == token:
            return True
    return False


_FIRST, _MOST = 1 << 16, 1 << 22
"""Entries of the first generation, and the most (34 MB, 400,000 tokens in one scope)."""
_KEPT = 1 << 19  # most tokens of finished responses that wait to be learnt for all groups
_FORGET = 0.5
"""Weight of acceptances under the last weights. Texts change slowly, and failures are retried."""
_EVERYWHERE = np.uint64(0)

Scopes = NDArray[np.uint64]


class Drafter:
    """Tables of the tokens that followed each context, and how often each kind of entry was right.
    Texts are learnt when a sequence drafts. A group's responses and hints are learnt under its own
    scope, those of past rounds under one scope for all."""

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
        return np.uint64(crc32(group.encode()) + 1)

    def first_of(self, scope: np.uint64) -> bool:
        """Whether the group is new, so that its prompt must be learnt. Marks it as known."""
        new = int(scope) not in self._known
        self._known.add(int(scope))
        return new

    def ended(self, scope: np.uint64, text: Ints, start: int) -> None:
        self._new.append((scope, text, start))

    def hint(self, scope: np.uint64, texts: Sequence[Ints]) -> None:
        self._new += [(scope, text, 0) for text in texts]

    def turn_over(self) -> None:
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
        """Learn the new tokens of running sequences, and draft their next ones.

        Args:
            texts: prompts and responses, (slots, context), with a scope each.
            rows: those that draft, (b,).
            spans: for every row, tokens learnt so far (updated), and lengths of prompt and
                response.
            most: tokens of each draft, (b,).

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
        """Count acceptances: the first ``right`` tokens of each draft were right, the next one was
        not."""
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


LONGEST_DRAFT = 63  # Tokens. Engines make as many uniforms ahead.
_LONGEST_PAUSE = 32  # most steps without drafts after misses, so that noise costs little


class RunningTexts(Protocol):
    """Sequences that an engine runs, one row each, as in ``mini.schedule.Slots``."""

    texts: Ints
    prompt: Ints
    count: Ints
    stops: Ints
    ticket: NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Drafts:
    """Tokens and buckets (b, k) of a step's drafts, of which the first ``lengths`` (b,) count."""

    tokens: Ints
    buckets: Ints
    lengths: Ints


class Speculator:
    """Drafts for an engine's running sequences. ``group`` names the group of a slot."""

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
        if how.most > LONGEST_DRAFT:
            raise ValueError(f"drafts have at most {LONGEST_DRAFT} tokens, not {how.most}")
        self.how = how
        self._misses = self._pause = 0

    def turn_over(self) -> None:
        self.how = NO_SPECULATION
        self._drafter.turn_over()

    def hear(self, request: Request) -> None:
        if request.hints:
            self._drafter.hint(self._drafter.scope(request.group), request.hints)

    def due(self, running: int) -> bool:
        if not 0 < running <= self.how.below:
            return False
        if self._pause:
            self._pause -= 1
            return False
        return True

    def draft(self, slots: Ints, most: Ints) -> Drafts | None:
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
        self._drafter.judge(drafts.buckets, drafts.lengths, right)
        if right.any():
            self._misses = 0
        else:
            self._missed()

    def ended(self, slot: int) -> None:
        if not self.how.below:
            return
        t = self._texts
        known = self._met[slot] == t.ticket[slot]
        start = int(self._learnt[slot]) if known else int(t.prompt[slot])
        text = t.texts[slot, : t.prompt[slot] + t.count[slot]].copy()
        self.over(self._group(slot), text, start)

    def over(self, group: PromptId, text: Ints, start: int) -> None:
        self._drafter.ended(self._drafter.scope(group), text, start)

    def _meet(self, slot: int) -> None:
        self._met[slot] = self._texts.ticket[slot]
        scope = self._scopes[slot] = self._drafter.scope(self._group(slot))
        first = self._drafter.first_of(scope)
        self._learnt[slot] = 0 if first else self._texts.prompt[slot]

    def _missed(self) -> None:
        self._misses += 1
        self._pause = min(self._misses // 2, _LONGEST_PAUSE)


_LEFT = 8  # responses still running when drafting begins
_TAIL = 4  # if many responses end together, the last quarter of the longest is decoded


class Rehearsal:
    """Decodes the response that ends each step again, with drafts that its engine could have made.

    As in ``MiniEngine``, drafts come from the prompt's other responses up to the same length, from
    its last visit and from earlier steps. The cost of a row does not limit them.
    """

    def __init__(self) -> None:
        self._drafter = Drafter()
        self._visits: dict[PromptId, Sequence[Ints]] = {}
        self.decoded = self.steps = self.verified = self.drafted = 0

    @property
    def tokens(self) -> float:
        """Tokens per decode step, those without a draft included. 1 without steps."""
        return self.decoded / self.steps if self.steps else 1.0

    @property
    def draft(self) -> int:
        """Mean tokens of a draft, rounded up, at least 1."""
        return max(1, math.ceil(self.drafted / max(1, self.verified)))

    def step(self, groups: Mapping[PromptId, Sequence[Ints]]) -> None:
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
    wrong = np.flatnonzero(draft != text[: len(draft)])
    return int(wrong[0]) if wrong.size else len(draft)
