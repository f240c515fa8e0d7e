"""GRPO (Shao et al., 2024, arXiv 2402.03300): group-normalised advantages."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rollpacker.config import GRPOConfig
from rollpacker.train.algorithms.base import GroupScaled


@dataclass(frozen=True)
class GRPO(GroupScaled):
    """Advantage ``(r - mean) / std`` in the group; averaged over tokens or over responses."""

    config: GRPOConfig

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
