"""Length distributions from right-censored observations.

Kaplan and Meier (1958). Lengths are whole tokens, so curves are arrays indexed by length.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

FINISHED, TRUNCATED, CENSORED = 0, 1, 2
"""How an attempt ended: by itself, at the length cap, or aborted while still running."""


@dataclass(frozen=True, slots=True, eq=False)
class Observations:
    """Lengths in tokens and how each ended, shapes (N,)."""

    lengths: NDArray[np.int64]
    ends: NDArray[np.int8]

    @classmethod
    def of(cls, lengths: ArrayLike, ends: ArrayLike | None = None) -> Observations:
        """From any sequences; ``ends`` defaults to all finished."""
        values = np.asarray(lengths, np.int64)
        flags = np.zeros(values.shape, np.int8) if ends is None else np.asarray(ends, np.int8)
        return cls(values, flags)

    @classmethod
    def joined(cls, parts: Iterable[Observations]) -> Observations:
        """All of them together."""
        pieces = list(parts)
        if not pieces:
            return cls.of([])
        return cls(
            np.concatenate([part.lengths for part in pieces]),
            np.concatenate([part.ends for part in pieces]),
        )

    def __len__(self) -> int:
        return int(self.lengths.size)


@dataclass(frozen=True, slots=True, eq=False)
class KaplanMeier:
    """The estimated distribution of lengths.

    Args:
        survival: ``survival[t] = P(length > t)``, shape (longest + 1,); its last entry is 0.
        truncated: estimated share of responses that reach the cap.
    """

    survival: NDArray[np.float64]
    truncated: float

    @classmethod
    def fit(cls, fresh: Observations, rerun: Observations, cap: int | None = None) -> KaplanMeier:
        """Estimate from short, full and audited attempts (``fresh``) and long rounds (``rerun``).

        Long rounds hold the losers of short ones, so they are a biased sample: their hazards
        are used only where too few fresh attempts are still at risk. Where nothing is known of
        the tail it is taken as exponential, up to ``cap`` tokens (Brown, Hollander and Korwar,
        1974). Raises ``ValueError`` without observations.
        """
        if not len(fresh) and not len(rerun):
            raise ValueError("no lengths observed yet")
        size = 1 + int(max(part.lengths.max() for part in (fresh, rerun) if len(part)))
        ended, cut, at_risk = _counts(fresh, size)
        more_ended, more_cut, more_at_risk = _counts(rerun, size)
        enough = max(_LEAST_AT_RISK, _LEAST_SHARE * len(fresh))
        with_rerun = (at_risk < enough) & (more_at_risk > 0)
        ended = ended + np.where(with_rerun, more_ended, 0)
        cut = cut + np.where(with_rerun, more_cut, 0)
        at_risk = np.maximum(at_risk + np.where(with_rerun, more_at_risk, 0), 1)
        survival = np.cumprod(1.0 - (ended + cut) / at_risk).astype(np.float64)
        before = np.concatenate(([1.0], survival[:-1]))
        truncated = float(np.sum(before * cut / at_risk))
        return cls(_completed(survival, cap), min(1.0, truncated))

    def at(self, length: ArrayLike) -> NDArray[np.float64]:
        """``P(L > length)``."""
        index = np.asarray(length, np.int64)
        inside = self.survival[np.clip(index, 0, self.survival.size - 1)]
        return np.where(index < 0, 1.0, inside)

    def mean(self) -> float:
        """In tokens."""
        return float(self.survival.sum())

    def quantile(self, q: ArrayLike) -> NDArray[np.int64]:
        """Shortest length ``t`` with ``P(L <= t) >= q``."""
        wanted = 1.0 - np.asarray(q, np.float64)
        found = np.searchsorted(-self.survival, -(wanted + 1e-12), side="left")
        return np.minimum(found, self.survival.size - 1).astype(np.int64)


def _completed(survival: NDArray[np.float64], cap: int | None) -> NDArray[np.float64]:
    """The curve with an exponential tail if it does not reach 0; ends at the first 0."""
    left, known = float(survival[-1]), survival.size
    if left >= 1.0:
        longest = cap or known
        return np.concatenate((np.ones(max(known, longest)), [0.0]))
    if left > 0.0:
        rate = -np.log(left) / known
        end = int(known * np.log(_NEGLIGIBLE) / np.log(left)) if left > _NEGLIGIBLE else known
        end = max(known, end if cap is None else min(end, cap))
        survival = np.concatenate((survival, np.exp(-rate * np.arange(known + 1, end + 1)), [0.0]))
    first_zero = int(np.argmax(survival <= 0.0))
    return survival[: first_zero + 1]


def _counts(
    seen: Observations, size: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    finished = np.bincount(seen.lengths[seen.ends == FINISHED], minlength=size)
    truncated = np.bincount(seen.lengths[seen.ends == TRUNCATED], minlength=size)
    everything = np.bincount(seen.lengths, minlength=size)
    return finished, truncated, np.cumsum(everything[::-1])[::-1]


_NEGLIGIBLE = 1e-4
_LEAST_AT_RISK = 20
_LEAST_SHARE = 0.005
