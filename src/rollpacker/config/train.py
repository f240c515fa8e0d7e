"""The update: algorithms, optimizer and trainers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from rollpacker.config.base import Config, Fixed, Free, Logged, Rounding, usual_kind


class TokenClip(Config):
    """Algorithms with one clipped probability ratio for each token."""

    delta: Fixed[float | None] = Field(default=None, gt=1.0)
    """Dual clip: the highest ratio that counts if the advantage is negative. It must exceed 1 +
    the upper clip range. TRL's ``delta``, and verl's ``clip_ratio_c`` (there always, 3)."""


class GroupScale(Config):
    """Algorithms whose advantages are divided by a standard deviation of rewards."""

    scale_rewards: Fixed[Literal["group", "batch", "none"]] = "group"
    """Divisor of centred rewards: their group's standard deviation, that of the whole step, or
    none. With ``batch`` no gradient starts before the rollout ends."""
    std_epsilon: Fixed[float] = Field(default=1e-6, ge=0.0)
    """Added to the standard deviation: 1e-6 as in verl, 1e-4 in TRL."""

    @field_validator("scale_rewards", mode="before")
    @classmethod
    def _names(cls, value: Any) -> Any:
        """Accept TRL's true and false."""
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
    """DAPO (Yu et al., 2025): clip-higher, token-level loss, overlong shaping. For its dynamic
    sampling set ``rollout.dynamic_sampling``, which works with any algorithm."""

    kind: Fixed[Literal["dapo"]] = "dapo"
    epsilon: Fixed[float] = 0.2
    """Lower clip range."""
    epsilon_high: Fixed[float] = 0.28
    """Upper clip range."""
    overlong_buffer: Fixed[int] = Field(default=0, ge=0)
    """Tokens before the cap over which the penalty grows. 0 for none."""
    overlong_penalty: Fixed[float] = 1.0
    """Penalty at the cap."""


class RLOOConfig(Config):
    """RLOO (Ahmadian et al., 2024): leave-one-out baseline, sequence-level REINFORCE."""

    kind: Fixed[Literal["rloo"]] = "rloo"
    epsilon: Fixed[float] = 0.2
    """Clip range of the sequence's probability ratio."""


class ReinforcePPConfig(TokenClip):
    """REINFORCE++ (Hu, 2025) with the group's mean as baseline."""

    kind: Fixed[Literal["reinforce_pp"]] = "reinforce_pp"
    whiten: Fixed[Literal["tokens", "batch", "responses"]] = "tokens"
    """Normalisation of centred rewards. ``tokens``: to mean 0 and variance 1 over tokens (verl's
    ``reinforce_plus_plus_baseline``). ``batch``: by the standard deviation of all rewards (TRL's
    ``scale_rewards="batch"``). ``responses``: by their root mean square."""
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


class LocalTrainerConfig(Config):
    """Each device holds a whole replica of the model, gradients and optimizer state."""

    kind: Rounding[Literal["local"]] = "local"

    def members(self, devices: int) -> int:
        """Return the devices of one replica, given the devices that train."""
        del devices
        return 1


class FSDPTrainerConfig(Config):
    """FSDP2: devices share a replica, each with a part of weights, gradients and optimizer."""

    kind: Rounding[Literal["fsdp"]] = "fsdp"
    shard: Rounding[int] = Field(default=0, ge=0)
    """Devices of a replica, neighbours by number. 0 takes all that train."""

    def members(self, devices: int) -> int:
        return self.shard or devices


TrainerConfig = Annotated[
    LocalTrainerConfig | FSDPTrainerConfig, Field(discriminator="kind"), usual_kind("local")
]


class SamplerCorrectionConfig(Config):
    """Importance weights, trainer over sampler, which correct [their
    differences](troubleshooting.md#sampler-and-trainer) under the same weights. They exclude
    ``rollout.top_p`` and ``top_k``."""

    kind: Logged[Literal["none", "truncate", "mask"]] = "none"
    """``none``: ratios are only measured, as ``sampler/*``. ``truncate``: weights above ``high``
    are ``high``. ``mask``: weights outside ``low`` to ``high`` are 0 (IcePop), but their tokens
    count in the divisor."""
    level: Logged[Literal["token", "sequence", "geometric"]] = "token"
    """The ratio of each token, of its response (the product), or its response's geometric mean."""
    low: Logged[float] = Field(default=0.5, ge=0.0, le=1.0)
    """Lower bound of the ratio for ``mask`` and ``sampler/outside``. 0 for none."""
    high: Logged[float] = Field(default=2.0, ge=1.0)
    """Upper bound. A response's ratio spreads much more than a token's, its geometric mean much
    less."""


class TrainConfig(Config):
    """The update."""

    algorithm: AlgorithmConfig = GRPOConfig()
    learning_rate: Logged[float | None] = Field(default=None, gt=0.0)
    """Peak learning rate of AdamW. Default: 1e-6 from 7B parameters on, more below, ten times as
    much with LoRA."""
    lr_scheduler_type: Logged[Literal["constant", "linear", "cosine"]] = "constant"
    """Schedule after warm-up."""
    warmup_steps: Logged[int] = Field(default=0, ge=0)
    """Steps of linear warm-up."""
    warmup_from_zero: Fixed[bool] = False
    """Begin warm-up at rate 0, as in transformers, TRL and verl. Otherwise it begins at ``1 /
    (warmup_steps + 1)`` of the peak."""
    weight_decay: Fixed[float] = Field(default=0.0, ge=0.0)
    """AdamW weight decay."""
    adam_beta1: Fixed[float] = 0.9
    """AdamW decay of the mean gradient."""
    adam_beta2: Fixed[float] = 0.999
    """AdamW decay of the mean squared gradient."""
    max_grad_norm: Fixed[float] = Field(default=1.0, ge=0.0)
    """Gradient clipping. 0 for none."""
    beta: Fixed[float] = Field(default=0.0, ge=0.0)
    """Weight of the KL to the reference model (the k3 estimator). 0 loads no reference."""
    kl_bias_correction: Fixed[bool] = True
    """Multiply the KL by the probability ratio, which makes its gradient unbiased (TRL's
    ``use_bias_correction_kl``)."""
    mask_truncated_completions: Fixed[bool] = False
    """Leave truncated responses out of the loss, but not out of their group's baseline (DAPO's
    overlong filtering)."""
    sampler_correction: SamplerCorrectionConfig = SamplerCorrectionConfig()
    updates_per_step: Fixed[int] = Field(default=1, ge=1)
    """Mini-batches that a step's groups are split into, one update each."""
    micro_batch_tokens: Rounding[int] = Field(default=1024, ge=1)
    """Padded tokens of one forward and backward."""
    packing: Rounding[Literal["auto", "padded", "prompt_shared"]] = "auto"
    """``prompt_shared`` runs the prompt of a group once. ``auto`` chooses it if prompts are long.
    """
    gradient_checkpointing: Free[bool] = False
    """Recompute activations in the backward pass."""
    max_skipped_updates: Free[int] = Field(default=3, ge=1)
    """Updates in a row whose loss or gradient is not finite before the run stops."""
