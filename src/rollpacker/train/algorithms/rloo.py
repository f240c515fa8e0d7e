"""RLOO (Ahmadian et al., 2024, arXiv 2402.14740): REINFORCE with a leave-one-out baseline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from rollpacker.config import RLOOConfig
from rollpacker.train.algorithms.base import Algorithm, Floats, Responses, clipped


@dataclass(frozen=True)
class RLOO(Algorithm):
    """The whole response is one action: one ratio, one advantage, mean over responses."""

    sequence_level: ClassVar[bool] = True

    config: RLOOConfig

    def advantages(self, rewards: NDArray[np.float64]) -> Floats:
        """``r_i`` less the mean of the others, which is ``(r_i - mean) * G / (G - 1)``."""
        count = len(rewards)
        return self.centred(rewards) * np.float32(count / max(count - 1, 1))

    def surrogate(self, responses: Responses) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``Algorithm``; a response's loss is spread evenly over its tokens."""
        ratio = torch.exp(responses.sequence_sum(responses.logprobs - responses.old))
        epsilon = self.config.epsilon
        loss, bound = clipped(ratio, responses.advantages, epsilon, epsilon)
        return (loss / responses.lengths)[responses.owner], bound[responses.owner]
