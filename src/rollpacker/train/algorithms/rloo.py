"""RLOO (Ahmadian et al., 2024, arXiv 2402.14740): REINFORCE with a leave-one-out baseline."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from rollpacker.config import RLOOConfig
from rollpacker.train.algorithms.base import Algorithm, Floats, Responses, centred, clipped


@dataclass(frozen=True)
class RLOO(Algorithm):
    """The whole response is one action: one ratio, one advantage, mean over responses."""

    config: RLOOConfig

    def advantages(self, rewards: Floats, lengths: NDArray[np.int64], max_length: int) -> Floats:
        """``r_i`` less the mean of the others, which is ``(r_i - mean) * G / (G - 1)``."""
        del lengths, max_length
        count = len(rewards)
        return centred(rewards) * np.float32(count / max(count - 1, 1))

    def surrogate(self, responses: Responses) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``Algorithm``; a response's loss is spread evenly over its tokens."""
        ratio = torch.exp(responses.sequence_sum(responses.logprobs - responses.old))
        epsilon = self.config.epsilon
        loss, bound = clipped(ratio, responses.advantages, epsilon, epsilon)
        return (loss / responses.lengths)[responses.owner], bound[responses.owner]

    def normaliser(self, tokens: int, samples: int, max_length: int) -> float:
        """Responses."""
        del tokens, max_length
        return float(samples)
