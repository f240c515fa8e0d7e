"""The update."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rollpacker.config.algorithms import AlgorithmConfig, GRPOConfig
from rollpacker.config.base import Config, usual_kind


class LocalTrainerConfig(Config):
    """Each device holds a whole replica of the model, its gradients and its optimizer state."""

    kind: Literal["local"] = "local"

    def members(self, devices: int) -> int:
        """Devices of a replica, of so many that train."""
        del devices
        return 1


class FSDPTrainerConfig(Config):
    """FSDP2: some devices share a replica, each with its part of the weights, gradients and
    optimizer state; its gradients are summed when the engines of all of them are idle."""

    kind: Literal["fsdp"] = "fsdp"
    shard: int = Field(default=0, ge=0)
    """Devices of a replica, neighbours by number; 0: all that train share one."""

    def members(self, devices: int) -> int:
        """Devices of a replica, of so many that train."""
        return self.shard or devices


TrainerConfig = Annotated[
    LocalTrainerConfig | FSDPTrainerConfig, Field(discriminator="kind"), usual_kind("local")
]


class SamplerCorrectionConfig(Config):
    """Importance weights for what the sampler computes otherwise than the trainer: a token's loss,
    without the KL term, counts times the trainer's probability over the sampler's, both under the
    weights that sampled. Not with ``rollout.top_p`` or ``top_k``, which cut its softmax."""

    kind: Literal["none", "truncate", "mask"] = "none"
    """``none``: measured only, as ``sampler/*``. ``truncate``: weights above ``high`` are ``high``
    (truncated importance sampling; verl's ``rollout_is_threshold: 2.0``, TRL's ``*_truncate``).
    ``mask``: weights outside ``low`` to ``high`` are 0 (IcePop; verl's ``rollout_is_threshold:
    0.5_2.0``, TRL's ``*_mask``); such tokens still count in the divisor."""
    level: Literal["token", "sequence", "geometric"] = "token"
    """The ratio of each token, that of its response (the product), or the geometric mean over the
    response."""
    low: float = Field(default=0.5, ge=0.0, le=1.0)
    """Lower bound of the ratio, of ``mask`` only; 0 for none. ``sampler/outside`` counts below it
    in any case."""
    high: float = Field(default=2.0, ge=1.0)
    """Upper bound of the ratio. A response's ratio spreads much more than a token's, its geometric
    mean much less."""


class TrainConfig(Config):
    """The update."""

    algorithm: AlgorithmConfig = GRPOConfig()
    learning_rate: float | None = Field(default=None, gt=0.0)
    """Peak learning rate of AdamW. Default: by the model's size, 1e-6 from 7B parameters on and
    more below, ten times as much with LoRA; the run prints it."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """Schedule after warm-up."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps of linear warm-up."""
    warmup_from_zero: bool = False
    """The first update of warm-up has rate 0, as in transformers, TRL and verl: then update ``u``
    of ``w`` (from 0) has ``u / w`` of the peak, else ``(u + 1) / (w + 1)``."""
    weight_decay: float = Field(default=0.0, ge=0.0)
    """AdamW weight decay."""
    adam_beta1: float = 0.9
    """AdamW decay of the mean gradient."""
    adam_beta2: float = 0.999
    """AdamW decay of the mean squared gradient."""
    max_grad_norm: float = Field(default=1.0, ge=0.0)
    """Gradient clipping; 0 for none."""
    beta: float = Field(default=0.0, ge=0.0)
    """Weight of the KL to the reference model (the k3 estimator); 0 loads no reference."""
    kl_bias_correction: bool = True
    """Multiply the KL by the probability ratio, which makes its gradient unbiased, on-policy too
    (DeepSeek-V3.2); TRL's ``use_bias_correction_kl``."""
    mask_truncated_completions: bool = False
    """Leave responses that were cut off out of the loss (DAPO's overlong filtering); their rewards
    count in their group's baseline, as in TRL."""
    sampler_correction: SamplerCorrectionConfig = SamplerCorrectionConfig()
    router_replay: bool = False
    """Mixtures of experts: send each token to the experts that the engine sent it to (R3, verl's
    ``router_replay.mode: R3``). No engine says which yet, so a run refuses it; it was measured with
    routes that were captured on a CPU."""
    updates_per_step: int = Field(default=1, ge=1)
    """Mini-batches that a step's groups are split into, one update each."""
    micro_batch_tokens: int = Field(default=1024, ge=1)
    """Padded tokens of one forward and backward."""
    packing: Literal["auto", "padded", "prompt_shared"] = "auto"
    """``prompt_shared`` runs the prompt of a group once, with a block mask; ``auto`` takes it
    where prompts are long."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass."""
    max_skipped_updates: int = Field(default=3, ge=1)
    """Stop after so many updates in a row with a loss or gradient that is not finite."""
