"""GRPO (Shao et al., 2024, arXiv 2402.03300): group-normalised advantages."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from rollpacker.config import GRPOConfig
from rollpacker.train.algorithms.base import (
    Algorithm,
    Floats,
    Responses,
    centred,
    standardised,
    token_surrogate,
)


@dataclass(frozen=True)
class GRPO(Algorithm):
    """Advantage ``(r - mean) / std`` in the group; averaged over tokens or over responses."""

    config: GRPOConfig

    def advantages(self, rewards: Floats, lengths: NDArray[np.int64], max_length: int) -> Floats:
        """See ``Algorithm``."""
        del lengths, max_length
        return standardised(rewards) if self.config.scale_rewards else centred(rewards)

    def surrogate(self, responses: Responses) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``Algorithm``."""
        return token_surrogate(responses, self.config.epsilon, self.config.epsilon)

    def weights(self, lengths: torch.Tensor) -> torch.Tensor:
        """``1 / length`` for the mean over responses."""
        if self.config.loss_type == "token_mean":
            return super().weights(lengths)
        return 1.0 / lengths

    def normaliser(self, tokens: int, samples: int, max_length: int) -> float:
        """Tokens, or responses for ``sequence_mean``."""
        if self.config.loss_type == "token_mean":
            return super().normaliser(tokens, samples, max_length)
        return float(samples)
