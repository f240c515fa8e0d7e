"""The update."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rollpacker.config.algorithms import AlgorithmConfig, GRPOConfig
from rollpacker.config.base import Config, Fixed, Free, LastBits, Said, usual_kind


class LocalTrainerConfig(Config):
    """Each device holds a whole replica of the model, gradients and optimizer state."""

    kind: LastBits[Literal["local"]] = "local"

    def members(self, devices: int) -> int:
        """Devices of a replica, of so many that train."""
        del devices
        return 1


class FSDPTrainerConfig(Config):
    """FSDP2: devices share a replica, each with its part of weights, gradients and optimizer
    state."""

    kind: LastBits[Literal["fsdp"]] = "fsdp"
    shard: LastBits[int] = Field(default=0, ge=0)
    """Devices of a replica, neighbours by number; 0: all that train."""

    def members(self, devices: int) -> int:
        """Devices of a replica, of so many that train."""
        return self.shard or devices


TrainerConfig = Annotated[
    LocalTrainerConfig | FSDPTrainerConfig, Field(discriminator="kind"), usual_kind("local")
]


class SamplerCorrectionConfig(Config):
    """Importance weights, trainer over sampler, for what [the two compute
    differently](guide.md#sampler-and-trainer) under the same weights. Not with ``rollout.top_p`` or
    ``top_k``."""

    kind: Said[Literal["none", "truncate", "mask"]] = "none"
    """``none``: measured only, as ``sampler/*``; ``truncate``: weights above ``high`` are ``high``;
    ``mask``: weights outside ``low`` to ``high`` are 0 (IcePop), but count in the divisor."""
    level: Said[Literal["token", "sequence", "geometric"]] = "token"
    """The ratio of each token, of its response (the product), or its response's geometric mean."""
    low: Said[float] = Field(default=0.5, ge=0.0, le=1.0)
    """Lower bound of the ratio for ``mask`` and ``sampler/outside``; 0 for none."""
    high: Said[float] = Field(default=2.0, ge=1.0)
    """Upper bound. A response's ratio spreads much more than a token's, its geometric mean much
    less."""


class TrainConfig(Config):
    """The update."""

    algorithm: AlgorithmConfig = GRPOConfig()
    learning_rate: Said[float | None] = Field(default=None, gt=0.0)
    """Peak learning rate of AdamW. Default: 1e-6 from 7B parameters on, more below, ten times as
    much with LoRA."""
    lr_scheduler_type: Said[Literal["constant", "linear", "cosine"]] = "constant"
    """Schedule after warm-up."""
    warmup_steps: Said[int] = Field(default=0, ge=0)
    """Steps of linear warm-up."""
    warmup_from_zero: Fixed[bool] = False
    """Begin warm-up at rate 0, as in transformers, TRL and verl; else at ``1 / (warmup_steps + 1)``
    of the peak."""
    weight_decay: Fixed[float] = Field(default=0.0, ge=0.0)
    """AdamW weight decay."""
    adam_beta1: Fixed[float] = 0.9
    """AdamW decay of the mean gradient."""
    adam_beta2: Fixed[float] = 0.999
    """AdamW decay of the mean squared gradient."""
    max_grad_norm: Fixed[float] = Field(default=1.0, ge=0.0)
    """Gradient clipping; 0 for none."""
    beta: Fixed[float] = Field(default=0.0, ge=0.0)
    """Weight of the KL to the reference model (the k3 estimator); 0 loads no reference."""
    kl_bias_correction: Fixed[bool] = True
    """Multiply the KL by the probability ratio, which makes its gradient unbiased (TRL's
    ``use_bias_correction_kl``)."""
    mask_truncated_completions: Fixed[bool] = False
    """Leave responses that were cut off out of the loss, not out of their group's baseline (DAPO's
    overlong filtering)."""
    sampler_correction: SamplerCorrectionConfig = SamplerCorrectionConfig()
    updates_per_step: Fixed[int] = Field(default=1, ge=1)
    """Mini-batches that a step's groups are split into, one update each."""
    micro_batch_tokens: LastBits[int] = Field(default=1024, ge=1)
    """Padded tokens of one forward and backward."""
    packing: LastBits[Literal["auto", "padded", "prompt_shared"]] = "auto"
    """``prompt_shared`` runs the prompt of a group once; ``auto`` takes it where prompts are
    long."""
    gradient_checkpointing: Free[bool] = False
    """Recompute activations in the backward pass."""
    max_skipped_updates: Free[int] = Field(default=3, ge=1)
    """Updates in a row whose loss or gradient is not finite before the run stops."""
