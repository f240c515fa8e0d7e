"""Policy-gradient algorithms and their options."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rollpacker.config.base import Config


class GRPOConfig(Config):
    """GRPO (Shao et al., 2024): group-normalised advantages, sequence-mean loss."""

    kind: Literal["grpo"] = "grpo"
    scale_rewards: bool = True
    """Divide advantages by the group's standard deviation."""
    loss_type: Literal["sequence_mean", "token_mean"] = "token_mean"
    """Average per response and then over responses, or over all tokens."""
    epsilon: float = 0.2
    """Clip range of the probability ratio."""


class DrGRPOConfig(Config):
    """Dr. GRPO (Liu et al., 2025): no standard deviation, constant normaliser."""

    kind: Literal["dr_grpo"] = "dr_grpo"
    epsilon: float = 0.2
    """Clip range of the probability ratio."""


class DAPOConfig(Config):
    """DAPO (Yu et al., 2025): clip-higher, token-level loss, overlong shaping."""

    kind: Literal["dapo"] = "dapo"
    epsilon: float = 0.2
    """Lower clip range."""
    epsilon_high: float = 0.28
    """Upper clip range."""
    overlong_buffer: int = Field(default=0, ge=0)
    """Soft punishment over the last so many tokens before the cap; 0 for none."""
    overlong_penalty: float = 1.0
    """Punishment at the cap."""


class RLOOConfig(Config):
    """RLOO (Ahmadian et al., 2024): leave-one-out baseline, sequence-level REINFORCE."""

    kind: Literal["rloo"] = "rloo"
    epsilon: float = 0.2
    """Clip range of the sequence's probability ratio."""


class ReinforcePPConfig(Config):
    """REINFORCE++ (Hu, 2025): group mean as baseline, advantages normalised over the batch."""

    kind: Literal["reinforce_pp"] = "reinforce_pp"
    epsilon: float = 0.2
    """Clip range of the probability ratio."""


class GSPOConfig(Config):
    """GSPO (Zheng et al., 2025): sequence-level, length-normalised ratio."""

    kind: Literal["gspo"] = "gspo"
    epsilon: float = 3e-4
    """Lower clip range."""
    epsilon_high: float = 4e-4
    """Upper clip range."""


AlgorithmConfig = Annotated[
    GRPOConfig | DrGRPOConfig | DAPOConfig | RLOOConfig | ReinforcePPConfig | GSPOConfig,
    Field(discriminator="kind"),
]
