"""Gradients while all that an engine has waits for environments: how many fit into such a gap."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rollpacker.core import events as ev

_FORGET = 1.0 / 256.0
"""What one more wait counts beside those before it."""


class Gaps:
    """Knows how long environments take, by the geometric mean: a few calls take very long."""

    def __init__(self) -> None:
        self._log_s: float | None = None

    def replied(self, event: ev.EnvironmentReplied) -> None:
        """An environment has answered a turn; how long it took to begin says nothing of that."""
        if event.turn < 0:
            return
        log_s = math.log(max(event.seconds, 1e-6))
        before = self._log_s
        self._log_s = log_s if before is None else before + _FORGET * (log_s - before)

    def tokens(self, waiting: int, token_s: float) -> int:
        """Tokens whose gradients are there, as far as one can tell, when the first of so many
        attempts goes on; 0 where nothing is known.

        More would pay only where the last attempts to end do not wait for them.

        Args:
            waiting: attempts.
            token_s: seconds of a token's gradients.
        """
        if self._log_s is None or token_s <= 0.0:
            return 0
        return int(math.exp(self._log_s) / waiting / token_s)

    def state_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {"log_s": self._log_s}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore ``state_dict``."""
        self._log_s = state["log_s"]
