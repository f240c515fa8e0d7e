"""Stop strings: decode a response as it grows and look at the new text only."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_TORN = 3
"""Characters that part of one may be decoded as, at either end of a window: of four bytes."""


class StopWatcher:
    """Watches one response for any of its stop strings.

    Tokens are decoded in windows: of one that is several times as long as any stop string only the
    last characters are kept, so each token is decoded a bounded number of times.

    Args:
        tokenizer: decodes.
        stop: the strings.
        start: tokens at the response's beginning that are not looked at (``Request.turn_start``).

    Attributes:
        seen: tokens that it has looked at.
    """

    def __init__(self, tokenizer: Any, stop: tuple[str, ...], start: int = 0) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._kept = max(map(len, stop)) + 2 * _TORN
        self._start = start
        self.seen = 0

    def found(self, tokens: NDArray[np.int32]) -> bool:
        """Whether a stop string ends within the tokens that are new since the last call."""
        self.seen = len(tokens)
        window = self._tokenizer.decode(tokens[self._start :].tolist())
        if any(s in window for s in self._stop):
            return True
        if len(window) >= 4 * self._kept + 64:
            self._advance(tokens)
        return False

    def _advance(self, tokens: NDArray[np.int32]) -> None:
        """Keep as many tokens as a stop string may still need and forget those before."""
        start = len(tokens)
        while len(self._tokenizer.decode(tokens[start:].tolist())) < self._kept:
            start -= 1
        self._start = start
