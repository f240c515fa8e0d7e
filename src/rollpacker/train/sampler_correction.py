"""How far the sampler's probabilities are from the trainer's, and the weights that make up for it.

Both are of the weights that sampled: what is left between them is arithmetic, or a mistake.
Truncated importance sampling: Yao et al., "Your Efficient RL Framework Secretly Brings You
Off-Policy RL Training" (2025); ``mask``: IcePop (Ring-1T, arXiv 2510.18855).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rollpacker.config import SamplerCorrectionConfig
from rollpacker.train.base import RATIO
from rollpacker.train.model.token_logprobs import k3

SUMS = (
    "sampler/k3",
    "sampler/abs_logprob_difference",
    RATIO,
    "sampler/outside",
    "sampler/weight",
    "sampler/squared_weight",
    "sampler/perplexity_ratio",
    "sampler/responses",
)
"""What is summed over tokens, the last two over responses."""
_LARGEST_EXPONENT = 20.0


@dataclass(frozen=True, slots=True, eq=False)
class Agreement:
    """Of the sampled tokens of a micro-batch.

    Args:
        weights: what ``kind`` makes of the ratios, shape (N,); the ratios themselves with ``none``.
        sums: by ``SUMS``.
        extremes: largest ratio of a token, and the smallest one negated: shape (2,).
    """

    weights: torch.Tensor
    sums: torch.Tensor
    extremes: torch.Tensor


def agreement(
    trainer: torch.Tensor,
    sampler: torch.Tensor,
    owner: torch.Tensor,
    lengths: torch.Tensor,
    config: SamplerCorrectionConfig,
) -> Agreement:
    """Importance weights and what is measured.

    Nothing of it carries a gradient: weights change the measure, not what is optimised.

    Args:
        trainer: its log-probabilities under the weights that sampled, shape (N,), nats.
        sampler: log-probabilities as it said them, shape (N,).
        owner: the response of each token, shape (N,), int64.
        lengths: sampled tokens of each response, shape (S,), at least 1.
    """
    trainer = trainer.detach()
    log_ratio = trainer - sampler
    whole = log_ratio.new_zeros(len(lengths)).index_add(0, owner, log_ratio)
    mean = whole / lengths
    at_level = {"token": log_ratio, "sequence": whole[owner], "geometric": mean[owner]}
    ratio = _exp(at_level[config.level])
    inside = (ratio >= config.low) & (ratio <= config.high)
    weights = ratio
    if config.kind == "truncate":
        weights = ratio.clamp(max=config.high)
    elif config.kind == "mask":
        weights = torch.where(inside, ratio, 0.0)
    token_ratio = _exp(log_ratio)
    values = (
        k3(sampler, trainer),
        log_ratio.abs(),
        token_ratio,
        (~inside).float(),
        weights,
        weights.square(),
        _exp(-mean),
        torch.ones_like(mean),
    )
    return Agreement(
        weights=weights,
        sums=torch.stack([value.sum() for value in values]),
        extremes=torch.stack((token_ratio.max(), -token_ratio.min())),
    )


def _exp(log_ratio: torch.Tensor) -> torch.Tensor:
    return log_ratio.clamp(-_LARGEST_EXPONENT, _LARGEST_EXPONENT).exp()
