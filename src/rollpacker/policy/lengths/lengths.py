"""What is known of response lengths, from the rounds of the last steps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rollpacker.core.groups import intraclass_correlation
from rollpacker.core.types import PromptId, RoundKind
from rollpacker.policy.lengths.censoring import (
    CENSORED,
    FINISHED,
    TRUNCATED,
    KaplanMeier,
    Observations,
)

Source = RoundKind | Literal["audit"]
"""Where a length was seen: a round's kind, or an audit (a prompt of a raced round that runs
without aborts)."""

ENOUGH_GROUPS = 16
"""Prompts from which a correlation is worth something."""


@dataclass(slots=True)
class _Round:
    """Attempts of one step and source, by prompt; ``ends`` as in ``censoring``."""

    step: int
    source: str
    lengths: dict[PromptId, list[int]] = field(default_factory=dict[PromptId, list[int]])
    ends: dict[PromptId, list[int]] = field(default_factory=dict[PromptId, list[int]])
    _joined: Observations | None = None

    def observations(self) -> Observations:
        """All attempts; a round that is over is put together once."""
        count = sum(map(len, self.ends.values()))
        if self._joined is None or len(self._joined) != count:
            self._joined = Observations.of(
                [length for group in self.lengths.values() for length in group],
                [end for group in self.ends.values() for end in group],
            )
        return self._joined


class LengthHistory:
    """Response lengths of the last ``window`` steps.

    Args:
        cap: longest response in tokens; None where unknown.
        window: steps that the estimates are made from.
    """

    def __init__(self, cap: int | None = None, window: int = 20) -> None:
        self._cap = cap
        self._window = window
        self._rounds: dict[tuple[int, str], _Round] = {}
        self._cache: dict[str, Any] = {}
        self._step = -1

    def observe(
        self,
        prompt: PromptId,
        length: int,
        censored: bool,
        kind: Source,
        step: int,
        truncated: bool = False,
    ) -> None:
        """Take one attempt that ended (``truncated``: at the cap) or was aborted (``censored``)."""
        if step > self._step:
            self._begin(step)
        self._cache.clear()
        key = (step, str(kind))
        seen = self._rounds.get(key)
        if seen is None:
            seen = self._rounds[key] = _Round(*key)
        end = CENSORED if censored else TRUNCATED if truncated else FINISHED
        seen.lengths.setdefault(prompt, []).append(length)
        seen.ends.setdefault(prompt, []).append(end)

    def _begin(self, step: int) -> None:
        for key in [key for key in self._rounds if key[0] <= step - self._window]:
            del self._rounds[key]
        self._step = step

    def __len__(self) -> int:
        """Attempts in the window."""
        return sum(len(group) for seen in self._rounds.values() for group in seen.lengths.values())

    def seen(self, *kinds: Source) -> Observations:
        """Attempts in the window, of these kinds or of all."""
        names = {str(kind) for kind in kinds}
        return Observations.joined(
            seen.observations()
            for seen in self._rounds.values()
            if not names or seen.source in names
        )

    def distribution(self) -> KaplanMeier:
        """The true length distribution. Raises ``ValueError`` before the first observation."""
        if "distribution" not in self._cache:
            fresh = self.seen(RoundKind.SHORT, RoundKind.FULL, "audit")
            rerun = self.seen(RoundKind.LONG)
            self._cache["distribution"] = KaplanMeier.fit(fresh, rerun, self._cap)
        return self._cache["distribution"]

    def icc(self) -> float:
        """Intraclass correlation of length within a prompt, 0 to 1; 0 where not known."""
        if "icc" not in self._cache:
            self._cache["icc"] = known_correlation(self.complete_groups())
        return self._cache["icc"]

    def complete_groups(self) -> list[NDArray[np.float64]]:
        """Lengths of each unraced prompt of the window whose attempts all ended.

        Long rounds hold losers only, which correlates them less: they are left out where there
        are enough others (``ENOUGH_GROUPS``).
        """
        groups = self.unselected_groups()
        if len(groups) >= ENOUGH_GROUPS:
            return groups
        return [*groups, *self._groups(RoundKind.LONG)]

    def unselected_groups(self) -> list[NDArray[np.float64]]:
        """The same from full rounds and audits alone."""
        return [*self._groups(RoundKind.FULL), *self._groups("audit")]

    def _groups(self, kind: Source) -> Iterator[NDArray[np.float64]]:
        for seen in self._rounds.values():
            if seen.source == str(kind):
                for prompt, ends in seen.ends.items():
                    if len(ends) > 1 and CENSORED not in ends:
                        yield np.asarray(seen.lengths[prompt], np.float64)

    def state_dict(self) -> dict[str, Any]:
        """Everything observed, as JSON."""
        return {
            "step": self._step,
            "rounds": [
                {
                    "step": seen.step,
                    "source": seen.source,
                    "lengths": {prompt: list(group) for prompt, group in seen.lengths.items()},
                    "ends": {prompt: list(group) for prompt, group in seen.ends.items()},
                }
                for seen in self._rounds.values()
            ],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what ``state_dict`` returned."""
        self._step = state["step"]
        self._rounds = {(seen["step"], seen["source"]): _Round(**seen) for seen in state["rounds"]}
        self._cache.clear()


def shrunk_mean(own: float, count: int, grand: float, icc: float) -> float:
    """Empirical-Bayes mean of a prompt from ``count`` responses (James and Stein, 1961)."""
    trust = count * icc / (1.0 + (count - 1) * icc)
    return grand + trust * (own - grand)


def known_correlation(groups: Sequence[NDArray[np.float64]]) -> float:
    """Intraclass correlation over groups of two or more, clipped to 0..1.

    0 with fewer than two groups or without any variance.
    """
    if len(groups) < 2:
        return 0.0
    numbers = np.repeat(np.arange(len(groups)), [group.size for group in groups])
    found = intraclass_correlation(np.concatenate(groups), numbers)
    return min(1.0, max(0.0, found)) if math.isfinite(found) else 0.0
