"""Policy-gradient algorithms and their options."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from rollpacker.config.base import Config, Fixed, usual_kind


class TokenClip(Config):
    """Algorithms with one clipped probability ratio for each token."""

    delta: Fixed[float | None] = Field(default=None, gt=1.0)
    """Dual clip: the most that a ratio counts where the advantage is negative; above 1 + the upper
    clip range. TRL's ``delta``, verl's ``clip_ratio_c`` (there always, 3)."""


class GroupScale(Config):
    """Algorithms whose advantages are divided by a standard deviation of rewards."""

    scale_rewards: Fixed[Literal["group", "batch", "none"]] = "group"
    """What centred rewards are divided by: their group's standard deviation, that of the whole step
    (then no gradient starts before the rollout ends), or nothing."""
    std_epsilon: Fixed[float] = Field(default=1e-6, ge=0.0)
    """Added to the standard deviation: 1e-6 as in verl, 1e-4 in TRL."""

    @field_validator("scale_rewards", mode="before")
    @classmethod
    def _names(cls, value: Any) -> Any:
        """True and false, as of version 0.1.0 and TRL."""
        return ("group" if value else "none") if isinstance(value, bool) else value


class GRPOConfig(TokenClip, GroupScale):
    """GRPO (Shao et al., 2024): group-normalised advantages."""

    kind: Fixed[Literal["grpo"]] = "grpo"
    loss_type: Fixed[Literal["sequence_mean", "token_mean"]] = "token_mean"
    """Average per response and then over responses, or over all tokens."""
    epsilon: Fixed[float] = 0.2
    """Clip range of the probability ratio."""


class DrGRPOConfig(TokenClip):
    """Dr. GRPO (Liu et al., 2025): no standard deviation, constant normaliser."""

    kind: Fixed[Literal["dr_grpo"]] = "dr_grpo"
    epsilon: Fixed[float] = 0.2
    """Clip range of the probability ratio."""


class DAPOConfig(TokenClip, GroupScale):
    """DAPO (Yu et al., 2025): clip-higher, token-level loss, overlong shaping; its dynamic sampling
    is ``rollout.dynamic_sampling``, of any algorithm."""

    kind: Fixed[Literal["dapo"]] = "dapo"
    epsilon: Fixed[float] = 0.2
    """Lower clip range."""
    epsilon_high: Fixed[float] = 0.28
    """Upper clip range."""
    overlong_buffer: Fixed[int] = Field(default=0, ge=0)
    """Tokens before the cap over which the punishment grows; 0 for none."""
    overlong_penalty: Fixed[float] = 1.0
    """Punishment at the cap."""


class RLOOConfig(Config):
    """RLOO (Ahmadian et al., 2024): leave-one-out baseline, sequence-level REINFORCE."""

    kind: Fixed[Literal["rloo"]] = "rloo"
    epsilon: Fixed[float] = 0.2
    """Clip range of the sequence's probability ratio."""


class ReinforcePPConfig(TokenClip):
    """REINFORCE++ (Hu, 2025) with the group's mean as baseline."""

    kind: Fixed[Literal["reinforce_pp"]] = "reinforce_pp"
    whiten: Fixed[Literal["tokens", "batch", "responses"]] = "tokens"
    """How centred rewards are normalised: ``tokens`` to mean 0 and variance 1 over tokens (verl's
    ``reinforce_plus_plus_baseline``), ``batch`` by the standard deviation of all rewards (TRL's
    ``scale_rewards="batch"``), ``responses`` by their root mean square."""
    epsilon: Fixed[float] = 0.2
    """Clip range of the probability ratio."""


class GSPOConfig(GroupScale):
    """GSPO (Zheng et al., 2025): sequence-level, length-normalised ratio."""

    kind: Fixed[Literal["gspo"]] = "gspo"
    epsilon: Fixed[float] = 3e-4
    """Lower clip range."""
    epsilon_high: Fixed[float] = 4e-4
    """Upper clip range."""


AlgorithmConfig = Annotated[
    GRPOConfig | DrGRPOConfig | DAPOConfig | RLOOConfig | ReinforcePPConfig | GSPOConfig,
    Field(discriminator="kind"),
    usual_kind("grpo"),
]
