"""Dr. GRPO (Liu et al., 2025, arXiv 2503.20783): GRPO without its two length and scale biases."""

from __future__ import annotations

from dataclasses import dataclass

from rollpacker.config import DrGRPOConfig
from rollpacker.train.algorithms.base import Algorithm


@dataclass(frozen=True)
class DrGRPO(Algorithm):
    """Advantage ``r - mean``; token sums over the constant ``samples * max_length``."""

    config: DrGRPOConfig

    def normaliser(self, tokens: int, samples: int, max_length: int) -> float:
        """A constant for each response, whatever its length."""
        del tokens
        return float(samples * max_length)
