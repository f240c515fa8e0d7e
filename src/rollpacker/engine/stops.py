"""Stop strings: decode a response as it grows and look at the new text only."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_REPLACEMENT = "\ufffd"


class StopWatcher:
    """Watches one response for any of its stop strings.

    Tokens are decoded in windows: a window is closed when its text ends on a whole character and
    is longer than any stop string, so each token is decoded a bounded number of times.

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
        self._longest = max(len(s) for s in stop)
        self._start = start
        self._read = 0
        self.seen = 0

    def found(self, tokens: NDArray[np.int32]) -> bool:
        """Whether a stop string ends within the tokens that are new since the last call."""
        self.seen = len(tokens)
        window = self._tokenizer.decode(tokens[self._start :].tolist())
        text = window[max(0, self._read - self._longest + 1) :]
        if any(s in text for s in self._stop):
            return True
        if not window.endswith(_REPLACEMENT):
            self._advance(tokens, window)
        return False

    def _advance(self, tokens: NDArray[np.int32], window: str) -> None:
        """Keep as many tokens as a stop string may still need and forget those before."""
        self._read = len(window)
        if self._read < 4 * self._longest + 64:
            return
        tail = len(tokens)
        text = ""
        while len(text) < self._longest or text.startswith(_REPLACEMENT):
            tail -= 1
            text = self._tokenizer.decode(tokens[tail:].tolist())
        self._start, self._read = tail, len(text)
