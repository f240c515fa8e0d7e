"""GSPO (Zheng et al., 2025, arXiv 2507.18071): one length-normalised ratio per response."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from rollpacker.config import GSPOConfig
from rollpacker.train.algorithms.base import GroupScaled, Responses, clipped


@dataclass(frozen=True)
class GSPO(GroupScaled):
    """GRPO's advantage, ratio ``exp(mean(logp - old))`` of a response, mean over responses."""

    sequence_level: ClassVar[bool] = True

    config: GSPOConfig

    def surrogate(self, responses: Responses) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``Algorithm``; every token of a response has the response's loss."""
        loss, bound = clipped(
            self._ratios(responses),
            responses.advantages,
            self.config.epsilon,
            self.config.epsilon_high,
        )
        return loss[responses.owner], bound[responses.owner]

    def ratio(self, responses: Responses) -> torch.Tensor:
        """See ``Algorithm``; the response's, as in TRL."""
        return self._ratios(responses)[responses.owner]

    def _ratios(self, responses: Responses) -> torch.Tensor:
        log_ratio = responses.sequence_sum(responses.logprobs - responses.old)
        return torch.exp(log_ratio / responses.lengths)

    def weights(self, lengths: torch.Tensor) -> torch.Tensor:
        """``1 / length``: the mean over a response's tokens."""
        return 1.0 / lengths
