"""REINFORCE++ (Hu, 2025, arXiv 2501.03262), the variant with the group's mean as baseline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rollpacker.config import ReinforcePPConfig
from rollpacker.train.algorithms.base import Algorithm, Floats, Rewarded, over_batch_std

_EPSILON = 1e-8
"""Of verl's ``masked_whiten`` (added to the variance), and of version 0.1.0."""
_TRL_EPSILON = 1e-4


@dataclass(frozen=True)
class ReinforcePP(Algorithm):
    """Advantage ``r - group mean``, normalised over the whole batch."""

    config: ReinforcePPConfig

    @property
    def needs_batch(self) -> bool:
        """Always."""
        return True

    @property
    def trains_equal(self) -> bool:
        """Whitening over tokens moves the mean: longer responses weigh more in it."""
        return self.config.whiten == "tokens"

    def batch_advantages(self, groups: Sequence[Rewarded]) -> list[Floats]:
        """See ``ReinforcePPConfig.whiten``."""
        if not groups:
            return []
        match self.config.whiten:
            case "tokens":
                return _token_whitened(groups)
            case "batch":
                return over_batch_std(groups, _TRL_EPSILON)
            case "responses":
                values = np.concatenate([g.advantages[~np.isnan(g.rewards)] for g in groups])
                std = np.sqrt(np.square(values, dtype=np.float64).sum() / max(len(values), 1))
                return [(g.advantages / (std + _EPSILON)).astype(np.float32) for g in groups]


def _token_whitened(groups: Sequence[Rewarded]) -> list[Floats]:
    """Mean 0 and variance 1 over the tokens of the loss (``ddof=1``), as verl's."""
    known = [~np.isnan(group.rewards) for group in groups]
    tokens = np.concatenate([g.tokens * k for g, k in zip(groups, known, strict=True)])
    values = np.concatenate([group.advantages for group in groups]).astype(np.float64)
    count = tokens.sum()
    if count < 2:
        return [np.zeros(len(group.advantages), np.float32) for group in groups]
    mean = float(tokens @ values) / count
    variance = float(tokens @ (values - mean) ** 2) / (count - 1)
    scale = 1.0 / np.sqrt(variance + _EPSILON)
    return [
        np.where(k, (g.advantages - mean) * scale, 0.0).astype(np.float32)
        for g, k in zip(groups, known, strict=True)
    ]
