"""Responses that engines may take drafts from, and that they have not sampled themselves."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
from numpy.typing import NDArray

from rollpacker.core.types import PromptId

_KEPT = 1 << 22
"""Most tokens of earlier visits: 16 MB."""

Texts = tuple[NDArray[np.int32], ...]


class DraftSources:
    """What was said to each prompt, in this step and at its last visit.

    Args:
        kept: most tokens of earlier visits; the oldest are forgotten first.
    """

    def __init__(self, kept: int = _KEPT) -> None:
        self._most = kept
        self._tokens = 0
        self._now: dict[PromptId, list[NDArray[np.int32]]] = defaultdict(list)
        self._before: dict[PromptId, Texts] = {}

    def begin(self) -> None:
        """A step begins."""
        for prompt, texts in self._now.items():
            self._forget(prompt)
            self._before[prompt] = tuple(texts)
            self._tokens += sum(map(len, texts))
        self._now.clear()
        while self._tokens > self._most:
            self._forget(next(iter(self._before)))

    def _forget(self, prompt: PromptId) -> None:
        self._tokens -= sum(map(len, self._before.pop(prompt, ())))

    def finished(self, prompt: PromptId, tokens: NDArray[np.int32]) -> None:
        """A response is there."""
        self._now[prompt].append(tokens)

    def earlier(self, prompt: PromptId) -> Texts:
        """What was said at the prompt's last visit."""
        return self._before.get(prompt, ())

    def siblings(self, prompt: PromptId) -> Texts:
        """What was said to it in this step, for one that goes on where that is not known."""
        return tuple(self._now.get(prompt, ()))
