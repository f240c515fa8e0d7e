"""What followed the last tokens before: a hash table of bounded memory, compiled by numba.

A key is a scope (a group's number, or 0 for all texts) and the last few tokens; an entry is the
token that came next and how often it did. There are two generations: the younger one is written,
and takes the place of the older one when it is half full, so nothing is ever searched for what to
forget. At most 40 bytes a token and scope.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit

LENGTHS = (1, 2, 3, 5, 8)
"""Tokens of a context; more than eight find nothing that these do not."""
LONGEST = LENGTHS[-1]
VOTES = 4
"""Most times that count: what came more often is as likely."""
_TRIED = 0.1
"""Probability from which on a token is drafted that costs nothing."""
BUCKETS = 2 * len(LENGTHS) * VOTES
"""Kinds of entries whose acceptance is told apart: scope, length of the context, votes."""


_TAG_BITS, _VOTE_BITS = np.uint64(32), np.uint64(29)
_TOKEN, _VOTE = np.uint64((1 << 29) - 1), np.uint64(7)
"""An entry: half of its key, votes, a token. One number, so that it is in one line of the cache."""


class DraftTable(NamedTuple):
    """One generation: (entries,), a power of two; ``used`` (1,) of them are taken."""

    entries: Any
    used: Any


def new_table(entries: int) -> DraftTable:
    """An empty one; its memory is taken as it fills."""
    return DraftTable(np.zeros(entries, np.uint64), np.zeros(1, np.int64))


@njit(cache=True, nogil=True)
def _mix(key: Any, token: Any) -> Any:
    """The key of a context that is one token longer (splitmix64's finaliser)."""
    z = key ^ (np.uint64(token + 1) * np.uint64(0x9E3779B97F4A7C15))
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@njit(cache=True, nogil=True)
def _place(table: Any, key: Any) -> tuple[Any, Any]:
    """Where an entry is, and its tag, which is never 0."""
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
    """Note what came at the places ``start`` to ``end`` of a text."""
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
    """The token behind a context, and how sure: votes, ``VOTES`` more where all texts say so. Its
    group's own texts come first; (-1, 0) where nobody knows."""
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
    """The token that should come at ``end`` and the bucket of what says so; (-1, -1) if nothing.

    The longest context wins; of one length the group's own texts. It is looked for first, since
    where much is drafted it is there; then from the shortest one on.
    """
    young, old = tables
    own, all_texts = scope, np.uint64(0)
    levels = 0
    for n in range(1, min(end, LONGEST) + 1):
        own, all_texts = _mix(own, text[end - n]), _mix(all_texts, text[end - n])
        if n == LENGTHS[levels]:
            keys[0, levels], keys[1, levels] = own, all_texts
            levels += 1
    token, bucket = -1, -1
    if levels:
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
    """Draft up to ``most`` tokens behind the first ``end`` of a text, as long as the last is likely
    to be reached, and to the first stop token at most; returns how many.

    Args: ``tables`` the younger and the older one; ``rates`` (``BUCKETS``,) how often a token of
    each bucket was right; ``least`` tokens that cost nothing, and the probability, as the product
    of these, below which a draft of more ends; ``stops`` (S,); ``room`` to work in, (``LONGEST`` +
    k,) and (2, ``len(LENGTHS)``); ``tokens`` and ``buckets`` (k,) take the result.
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
    """Whether it is one of them."""
    for each in tokens:  # noqa: SIM110 - numba compiles no generators
        if each == token:
            return True
    return False
