"""Learning rates by update number."""

from __future__ import annotations

import math

from rollpacker.config import TrainConfig


def learning_rate(config: TrainConfig, update: int, total: int) -> float:
    """Rate of update number ``update`` (from 0) of ``total``.

    Linear warm-up reaches the peak at update ``warmup_steps``; then constant, or linear or
    cosine decay to 0 after the last update.
    """
    peak, warmup = config.learning_rate, config.warmup_steps
    if update < warmup:
        return peak * (update + 1) / (warmup + 1)
    if config.lr_scheduler_type == "constant":
        return peak
    progress = min(1.0, (update - warmup) / max(1, total - warmup))
    if config.lr_scheduler_type == "linear":
        return peak * (1.0 - progress)
    return peak * 0.5 * (1.0 + math.cos(math.pi * progress))
