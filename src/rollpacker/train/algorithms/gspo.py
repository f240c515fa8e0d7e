"""GSPO (Zheng et al., 2025, arXiv 2507.18071): one length-normalised ratio per response."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from rollpacker.config import GSPOConfig
from rollpacker.train.algorithms.base import Algorithm, Floats, Responses, clipped, standardised


@dataclass(frozen=True)
class GSPO(Algorithm):
    """GRPO's advantage, ratio ``exp(mean(logp - old))`` of a response, mean over responses."""

    config: GSPOConfig

    def advantages(self, rewards: Floats, lengths: NDArray[np.int64], max_length: int) -> Floats:
        """See ``Algorithm``."""
        del lengths, max_length
        return standardised(rewards)

    def surrogate(self, responses: Responses) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``Algorithm``; every token of a response has the response's loss."""
        log_ratio = responses.sequence_sum(responses.logprobs - responses.old)
        ratio = torch.exp(log_ratio / responses.lengths)
        loss, bound = clipped(
            ratio, responses.advantages, self.config.epsilon, self.config.epsilon_high
        )
        return loss[responses.owner], bound[responses.owner]

    def weights(self, lengths: torch.Tensor) -> torch.Tensor:
        """``1 / length``: the mean over a response's tokens."""
        return 1.0 / lengths

    def normaliser(self, tokens: int, samples: int, max_length: int) -> float:
        """Responses."""
        del tokens, max_length
        return float(samples)
