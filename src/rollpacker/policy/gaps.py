"""Gradients while all that an engine has waits for environments: how many fit into such a gap."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rollpacker.core import events as ev

_KEPT = 256
"""Waits after which an earlier one hardly counts."""


class Gaps:
    """Knows how long environments take, by the geometric mean (a few calls take very long), and
    what gradients take."""

    def __init__(self) -> None:
        self._count = 0
        self._log_s = 0.0
        self._train_s = 0.0
        self._train_tokens = 0

    def replied(self, event: ev.EnvironmentReplied) -> None:
        """An environment has answered a turn; how long it took to begin says nothing of that."""
        if event.turn < 0:
            return
        self._count = min(self._count + 1, _KEPT)
        self._log_s += (math.log(max(event.seconds, 1e-6)) - self._log_s) / self._count

    def trained(self, tokens: int, seconds: float) -> None:
        """Gradients of so many tokens were computed."""
        self._train_tokens += tokens
        self._train_s += seconds

    def tokens(self, attempts: int) -> int:
        """Tokens whose gradients are there, as far as one can tell, when the first of so many
        attempts goes on; 0 where nothing is known.

        More would pay only where the last attempts to end do not wait for them.
        """
        if not (attempts and self._count and self._train_s > 0.0):
            return 0
        return int(math.exp(self._log_s) / attempts * self._train_tokens / self._train_s)

    def state_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "waits": [self._count, self._log_s],
            "train": [self._train_s, self._train_tokens],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore ``state_dict``."""
        self._count, self._log_s = state["waits"]
        self._train_s, self._train_tokens = state["train"]
