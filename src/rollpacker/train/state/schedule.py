"""Learning rates by update number."""

from __future__ import annotations

import math

from rollpacker.config import TrainConfig

_LARGE = 7e9
_LARGE_RATE = 1e-6
_LORA = 10.0


def default_learning_rate(parameters: int, *, lora: bool) -> float:
    """AdamW's rate for a model of so many parameters, to two digits.

    1e-6 from 7B on is what verl, TRL and DAPO (Yu et al., 2025) take there. Below it grows with
    1/sqrt(parameters): on the safe side of what was tried here (2e-5 for 135M, where 3e-5
    collapses; 3e-4 for 0.2M). Of a mixture of experts all parameters count, not the active ones:
    verl takes 1e-6 for Qwen3-30B-A3B too, as for dense models of its size. Ten times as
    much for LoRA (Schulman et al., 2025, "LoRA Without Regret").
    """
    rate = _LARGE_RATE * max(1.0, math.sqrt(_LARGE / parameters)) * (_LORA if lora else 1.0)
    return float(f"{rate:.1e}")


def check_schedule(config: TrainConfig, total_updates: int) -> None:
    """Raise ``ValueError`` when a decaying schedule lacks the number of updates."""
    if config.lr_scheduler_type != "constant" and total_updates <= 0:
        raise ValueError(
            f"train.lr_scheduler_type={config.lr_scheduler_type} needs the number of updates; "
            "set steps, or use constant"
        )


def learning_rate(config: TrainConfig, update: int, total: int) -> float:
    """Rate of update number ``update`` (from 0) of ``total``.

    Linear warm-up reaches the peak at update ``warmup_steps``, from 0 with ``warmup_from_zero``;
    then constant, or linear or cosine decay to 0 after the last update. A job chooses a peak where
    none is given; a trainer without a job takes that of large models.
    """
    peak, warmup = config.learning_rate or _LARGE_RATE, config.warmup_steps
    if update < warmup:
        first = 0 if config.warmup_from_zero else 1
        return peak * (update + first) / (warmup + first)
    if config.lr_scheduler_type == "constant":
        return peak
    progress = min(1.0, (update - warmup) / max(1, total - warmup))
    if config.lr_scheduler_type == "linear":
        return peak * (1.0 - progress)
    return peak * 0.5 * (1.0 + math.cos(math.pi * progress))
