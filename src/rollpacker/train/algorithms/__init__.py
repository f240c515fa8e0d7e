"""Policy-gradient algorithms, one file each, and the one place that chooses among them."""

from __future__ import annotations

from rollpacker.config import (
    AlgorithmConfig,
    DAPOConfig,
    DrGRPOConfig,
    GRPOConfig,
    GSPOConfig,
    ReinforcePPConfig,
    RLOOConfig,
)
from rollpacker.train.algorithms.base import Algorithm, Responses, informative
from rollpacker.train.algorithms.dapo import DAPO
from rollpacker.train.algorithms.dr_grpo import DrGRPO
from rollpacker.train.algorithms.grpo import GRPO
from rollpacker.train.algorithms.gspo import GSPO
from rollpacker.train.algorithms.reinforce_pp import ReinforcePP
from rollpacker.train.algorithms.rloo import RLOO

__all__ = ["Algorithm", "Responses", "build", "informative"]


def build(config: AlgorithmConfig) -> Algorithm:
    """The algorithm that a configuration describes."""
    match config:
        case GRPOConfig():
            return GRPO(config)
        case DrGRPOConfig():
            return DrGRPO(config)
        case DAPOConfig():
            return DAPO(config)
        case RLOOConfig():
            return RLOO(config)
        case ReinforcePPConfig():
            return ReinforcePP(config)
        case GSPOConfig():
            return GSPO(config)
