"""KV of turns that are over, kept until their attempts go on."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import numpy as np

from rollpacker.core.types import AttemptId
from rollpacker.engine.base import Ints, Request
from rollpacker.engine.mini.scheduling.blocks import Blocks


@dataclass(frozen=True, slots=True, eq=False)
class ParkedTurn:
    """A turn that is over.

    Args:
        prompt: its attempt's, token ids (P,).
        tokens: the response up to its end, (T,), at least one.
        blocks: of all tokens but the last, which has no KV yet.
    """

    prompt: Ints
    tokens: Ints
    blocks: list[int]

    @property
    def known(self) -> int:
        """Tokens with KV, from the first on."""
        return len(self.prompt) + len(self.tokens) - 1

    def begins(self, request: Request) -> bool:
        """Whether a request goes on where it ended."""
        begin = request.generated[: len(self.tokens)]
        same = np.array_equal(self.prompt, request.prompt)
        return same and np.array_equal(self.tokens, begin)


class Parked:
    """Turns that are over, by attempt: no slot is theirs, and their blocks go when some are needed.

    First go those whose attempts have not come back, the longest over first. Then those whose
    requests wait to be admitted, the last to come first, for its turn to run comes last.

    Args:
        blocks: of all sequences; each turn has one reference to each of its own.
    """

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self._away: dict[AttemptId, ParkedTurn] = {}
        self._back: dict[AttemptId, ParkedTurn] = {}

    def put(self, attempt: AttemptId, turn: ParkedTurn) -> None:
        """Keep a turn; its references come along."""
        assert attempt not in self._away
        assert attempt not in self._back
        self._blocks.park(turn.blocks)
        self._away[attempt] = turn

    def come_back(self, request: Request) -> None:
        """A request waits: keep its attempt's turn for it, or drop that of another text."""
        turn = self._away.get(request.attempt)
        if turn is None:
            return
        if turn.begins(request):
            self._back[request.attempt] = self._away.pop(request.attempt)
        else:
            self.drop(request.attempt)

    def find(self, attempt: AttemptId) -> ParkedTurn | None:
        """What is there for an attempt that has come back."""
        return self._back.get(attempt)

    def take(self, attempt: AttemptId) -> ParkedTurn:
        """Hand out what was found, with its references."""
        turn = self._back.pop(attempt)
        self._blocks.unpark(turn.blocks)
        return turn

    def evict(self, but: AttemptId) -> bool:
        """Drop the turn that is first to go, but that of one attempt; whether there was one."""
        back = (attempt for attempt in reversed(self._back) if attempt != but)
        first = next(chain(self._away, back), None)
        if first is not None:
            self.drop(first)
        return first is not None

    def drop(self, attempt: AttemptId) -> None:
        """Give up an attempt's turn, if there is one."""
        turn = self._away.pop(attempt, None) or self._back.pop(attempt, None)
        if turn is not None:
            self._blocks.unpark(turn.blocks)
            self._blocks.drop(turn.blocks)

    def clear(self) -> None:
        """Give up all."""
        for attempt in [*self._away, *self._back]:
            self.drop(attempt)
