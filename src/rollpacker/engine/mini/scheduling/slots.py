"""State of the running sequences as arrays, so that a step's bookkeeping is vectorised."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from rollpacker.core.types import NO_DRAFTS, Drafted
from rollpacker.engine.base import Floats, Ints, Request, uniforms
from rollpacker.engine.drafts.draft_table import among
from rollpacker.engine.drafts.speculator import LONGEST_DRAFT

CHUNK = LONGEST_DRAFT + 1
"""Uniforms that are made at a time."""


class Slots:
    """One row per running sequence.

    Attributes:
        tables: (slots, blocks of the context) int32 block of each 16 tokens.
        token: last token, not yet run.
        prompt: tokens of the prompt.
        count: response tokens so far.
        limit: most response tokens.
        texts: (slots, context) the prompt and, behind it, the response.
        logprobs: (slots, context) of the response.
        stops: (slots, S) token ids that end it, filled up with -1.
        temperature, top_k, top_p: of its sampling parameters.
        room: tokens that its blocks hold.
        ticket: another one for each sequence that comes into a slot.
        drafts: (slots, 3) verifications, drafted and accepted tokens (``Drafted``).
    """

    def __init__(self, count: int, context: int, block_size: int) -> None:
        self.tables = np.zeros((count, -(-context // block_size)), np.int32)
        self.token = np.zeros(count, np.int32)
        self.prompt = np.zeros(count, np.int32)
        self.count = np.zeros(count, np.int32)
        self.limit = np.zeros(count, np.int32)
        self.texts = np.zeros((count, context), np.int32)
        self.logprobs = np.zeros((count, context), np.float32)
        self.stops = np.full((count, 4), -1, np.int32)
        self.temperature = np.zeros(count, np.float32)
        self.top_k = np.zeros(count, np.int32)
        self.top_p = np.ones(count, np.float32)
        self.room = np.zeros(count, np.int32)
        self.ticket = np.zeros(count, np.int64)
        self.drafts = np.zeros((count, len(NO_DRAFTS)), np.int64)
        self._seed = [0] * count
        self._uniforms = np.zeros((count, 2 * CHUNK))

    def fill(
        self, slot: int, request: Request, tokens: Ints, logprobs: Floats, drafts: Drafted
    ) -> None:
        """Put a request with what it has generated so far into a slot."""
        params = request.params
        prompt, done = len(request.prompt), len(tokens)
        self.prompt[slot] = prompt
        self.count[slot] = done
        self.limit[slot] = params.max_tokens
        self.texts[slot, :prompt] = request.prompt
        self.texts[slot, prompt : prompt + done] = tokens
        self.logprobs[slot, :done] = logprobs
        self.temperature[slot] = params.temperature
        self.top_k[slot] = params.top_k
        self.top_p[slot] = params.top_p
        self.ticket[slot] = self.ticket.max() + 1
        self.drafts[slot] = drafts
        stops = () if params.ignore_stop else params.stop_token_ids
        if len(stops) > self.stops.shape[1]:
            wider = np.full((len(self.stops), len(stops)), -1, np.int32)
            wider[:, : self.stops.shape[1]] = self.stops
            self.stops = wider
        self.stops[slot] = -1
        self.stops[slot, : len(stops)] = stops
        self._seed[slot] = request.seed
        start = done - done % CHUNK
        there = np.arange(start, start + 2 * CHUNK) % (2 * CHUNK)
        self._uniforms[slot, there] = uniforms(request.seed, start, 2 * CHUNK)

    def draw_uniforms(self, slots: Ints, ahead: Ints | int = 0) -> NDArray[np.float64]:
        """The uniform of each slot's next token, or of one so far ``ahead``, below ``CHUNK``."""
        return self._uniforms[slots, (self.count[slots] + ahead) % (2 * CHUNK)]

    def append(self, slots: Ints, tokens: Ints, logprobs: Floats) -> tuple[Ints, Ints]:
        """Add a token to each slot; returns the slots that sampled a stop token or hit the limit.

        A slot that did both is only among the first.
        """
        count = self.count[slots]
        self.texts[slots, self.prompt[slots] + count] = tokens
        self.logprobs[slots, count] = logprobs
        self.token[slots] = tokens
        count += 1
        self.count[slots] = count
        self._draw_on(slots[count % CHUNK == 0])
        stopped = (self.stops[slots] == tokens[:, None]).any(axis=1)
        full = (count >= self.limit[slots]) & ~stopped
        return slots[stopped], slots[full]

    def settle(
        self, slots: Ints, drafts: Ints, lengths: Ints, tokens: Ints, logprobs: Floats
    ) -> tuple[Ints, Ints, Ints]:
        """Keep what was sampled along each slot's draft up to the first token that differs from
        it, that one too, or to the first stop token.

        Args:
            slots: (b,) each with its rows together.
            drafts: (b, k), of which ``lengths`` (b,) tokens are a slot's draft.
            tokens: (rows,) sampled, one more for each slot than its draft has.
            logprobs: (rows,) of them.

        Returns drafted tokens that were right (b,), and slots as ``append`` does.
        """
        right, ends = np.empty((2, len(slots)), np.int32)
        where = (slots, self.prompt, self.count, self.limit, self.token)
        theirs = (self.stops, self.texts, self.logprobs, self.drafts)
        over, chunks = _settle(where, drafts, lengths, tokens, logprobs, theirs, right, ends)
        if chunks:
            crossed = self.count[slots] % CHUNK <= lengths
            self._draw_on(slots[crossed & (self.count[slots] >= CHUNK)])
        if not over:
            return right, _NOBODY, _NOBODY
        return right, slots[ends == _STOPPED], slots[ends == _FULL]

    def _draw_on(self, slots: Ints) -> None:
        """Each has entered a chunk of its uniforms: make the one behind it."""
        for slot in slots:
            start = (int(self.count[slot]) // CHUNK + 1) * CHUNK
            place = start % (2 * CHUNK)
            self._uniforms[slot, place : place + CHUNK] = uniforms(self._seed[slot], start, CHUNK)

    def text(self, slot: int) -> Ints:
        """A slot's prompt and response so far; not a copy."""
        return self.texts[slot, : self.prompt[slot] + self.count[slot]]

    def cut(self, slot: int, count: int) -> None:
        """Its response ends after so many tokens, which are fewer than it has."""
        self.count[slot] = count

    def response(self, slot: int) -> tuple[Ints, Floats]:
        """Copies of a slot's response tokens and logprobs."""
        prompt, count = self.prompt[slot], self.count[slot]
        return self.texts[slot, prompt : prompt + count].copy(), self.logprobs[slot, :count].copy()


_NOBODY = np.zeros(0, np.int32)
_STOPPED, _FULL = 1, 2


@njit(cache=True, nogil=True)
def _settle(
    where: Any,
    drafts: Any,
    lengths: Any,
    tokens: Any,
    logprobs: Any,
    theirs: Any,
    right: Any,
    ends: Any,
) -> tuple[int, int]:
    """``Slots.settle`` but for the uniforms; how many have ended, and entered a chunk of uniforms.

    Args: ``where`` slots, prompts, counts, limits and last tokens; ``theirs`` stop tokens, texts,
    logprobs and counts of drafts of all slots.
    """
    slots, prompts, counts, limits, last = where
    stops, texts, kept, stats = theirs
    row = over = chunks = 0
    for i in range(len(slots)):
        slot = slots[i]
        before = counts[slot] // CHUNK
        right[i] = ends[i] = 0
        for j in range(lengths[i] + 1):
            token, count = tokens[row + j], counts[slot]
            texts[slot, prompts[slot] + count] = token
            kept[slot, count] = logprobs[row + j]
            counts[slot] = count + 1
            agrees = j < lengths[i] and token == drafts[i, j]
            right[i] += agrees
            if among(stops[slot], token):
                ends[i] = _STOPPED
            if ends[i] or not agrees:
                break
        last[slot] = texts[slot, prompts[slot] + counts[slot] - 1]
        if not ends[i] and counts[slot] >= limits[slot]:
            ends[i] = _FULL
        over += ends[i] > 0
        chunks += counts[slot] // CHUNK > before
        stats[slot, 0] += lengths[i] > 0
        stats[slot, 1] += lengths[i]
        stats[slot, 2] += right[i]
        row += lengths[i] + 1
    return over, chunks
