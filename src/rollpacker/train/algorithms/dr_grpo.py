"""Dr. GRPO (Liu et al., 2025, arXiv 2503.20783): GRPO without its two length and scale biases."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from rollpacker.config import DrGRPOConfig
from rollpacker.train.algorithms.base import Algorithm, Floats, Responses, token_surrogate


@dataclass(frozen=True)
class DrGRPO(Algorithm):
    """Advantage ``r - mean``; token sums over the constant ``samples * max_length``."""

    config: DrGRPOConfig

    def advantages(self, rewards: NDArray[np.float64]) -> Floats:
        """See ``Algorithm``."""
        return self.centred(rewards)

    def surrogate(self, responses: Responses) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``Algorithm``."""
        config = self.config
        return token_surrogate(responses, config.epsilon, config.epsilon, config.delta)

    def normaliser(self, tokens: int, samples: int, max_length: int) -> float:
        """A constant for each response, whatever its length."""
        del tokens
        return float(samples * max_length)
