"""State of the running sequences as arrays, so that a step's bookkeeping is vectorised."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rollpacker.engine.base import Request, uniforms
from rollpacker.engine.mini.runner import Floats, Ints

_CHUNK = 64


class Slots:
    """One row per running sequence.

    Attributes:
        tables: (slots, blocks of the context) int32 block of each 16 tokens.
        token: last token, not yet run.
        prompt: tokens of the prompt.
        count: response tokens so far.
        limit: most response tokens.
        tokens, logprobs: (slots, context) the response.
        stops: (slots, S) token ids that end it, filled up with -1.
        temperature, top_k, top_p: of its sampling parameters.
    """

    def __init__(self, count: int, context: int, block_size: int) -> None:
        self.tables = np.zeros((count, -(-context // block_size)), np.int32)
        self.token = np.zeros(count, np.int32)
        self.prompt = np.zeros(count, np.int32)
        self.count = np.zeros(count, np.int32)
        self.limit = np.zeros(count, np.int32)
        self.tokens = np.zeros((count, context), np.int32)
        self.logprobs = np.zeros((count, context), np.float32)
        self.stops = np.full((count, 4), -1, np.int32)
        self.temperature = np.zeros(count, np.float32)
        self.top_k = np.zeros(count, np.int32)
        self.top_p = np.ones(count, np.float32)
        self._seed = [0] * count
        self._uniforms = np.zeros((count, _CHUNK))

    def fill(self, slot: int, request: Request, tokens: Ints, logprobs: Floats) -> None:
        """Put a request with what it has generated so far into a slot."""
        params = request.params
        done = len(tokens)
        self.prompt[slot] = len(request.prompt)
        self.count[slot] = done
        self.limit[slot] = params.max_tokens
        self.tokens[slot, :done] = tokens
        self.logprobs[slot, :done] = logprobs
        self.temperature[slot] = params.temperature
        self.top_k[slot] = params.top_k
        self.top_p[slot] = params.top_p
        stops = () if params.ignore_stop else params.stop_token_ids
        if len(stops) > self.stops.shape[1]:
            wider = np.full((len(self.stops), len(stops)), -1, np.int32)
            wider[:, : self.stops.shape[1]] = self.stops
            self.stops = wider
        self.stops[slot] = -1
        self.stops[slot, : len(stops)] = stops
        self._seed[slot] = request.seed
        self._uniforms[slot] = uniforms(request.seed, done - done % _CHUNK, _CHUNK)

    def draw_uniforms(self, slots: Ints) -> NDArray[np.float64]:
        """The uniform of each slot's next token."""
        return self._uniforms[slots, self.count[slots] % _CHUNK]

    def append(self, slots: Ints, tokens: Ints, logprobs: Floats) -> tuple[Ints, Ints]:
        """Add a token to each slot; returns the slots that sampled a stop token or hit the limit.

        A slot that did both is only among the first.
        """
        count = self.count[slots]
        self.tokens[slots, count] = tokens
        self.logprobs[slots, count] = logprobs
        self.token[slots] = tokens
        count += 1
        self.count[slots] = count
        for slot in slots[count % _CHUNK == 0]:
            self._uniforms[slot] = uniforms(self._seed[slot], int(self.count[slot]), _CHUNK)
        stopped = (self.stops[slots] == tokens[:, None]).any(axis=1)
        full = (count >= self.limit[slots]) & ~stopped
        return slots[stopped], slots[full]

    def response(self, slot: int) -> tuple[Ints, Floats]:
        """Copies of a slot's response tokens and logprobs."""
        count = self.count[slot]
        return self.tokens[slot, :count].copy(), self.logprobs[slot, :count].copy()
