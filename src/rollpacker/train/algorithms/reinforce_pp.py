"""REINFORCE++ (Hu, 2025, arXiv 2501.03262), the variant with the group's mean as baseline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from rollpacker.config import ReinforcePPConfig
from rollpacker.train.algorithms.base import (
    Algorithm,
    Floats,
    Responses,
    centred,
    token_surrogate,
)

_STD_EPSILON = 1e-8


@dataclass(frozen=True)
class ReinforcePP(Algorithm):
    """Advantage ``r - group mean`` over the standard deviation of the whole batch."""

    needs_batch: ClassVar[bool] = True

    config: ReinforcePPConfig

    def advantages(self, rewards: Floats, lengths: NDArray[np.int64], max_length: int) -> Floats:
        """See ``Algorithm``; not normalised yet."""
        del lengths, max_length
        return centred(rewards)

    def batch_advantages(self, groups: Sequence[Floats]) -> list[Floats]:
        """Divide by the batch's standard deviation; its mean is zero, as is every group's."""
        if not groups:
            return []
        std = np.sqrt(np.mean(np.square(np.concatenate(groups), dtype=np.float64)))
        return [(group / (std + _STD_EPSILON)).astype(np.float32) for group in groups]

    def surrogate(self, responses: Responses) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``Algorithm``."""
        return token_surrogate(responses, self.config.epsilon, self.config.epsilon)
