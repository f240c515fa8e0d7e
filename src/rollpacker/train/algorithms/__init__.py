"""Policy-gradient algorithms, one file each, and the one place that chooses among them.

An algorithm knows no model, no replica and no batch layout.
"""

from __future__ import annotations

from rollpacker.config import AlgorithmConfig
from rollpacker.config import algorithms as configs
from rollpacker.config.base import Config
from rollpacker.train.algorithms.base import Algorithm, Responses, Rewarded
from rollpacker.train.algorithms.dapo import DAPO
from rollpacker.train.algorithms.dr_grpo import DrGRPO
from rollpacker.train.algorithms.grpo import GRPO
from rollpacker.train.algorithms.gspo import GSPO
from rollpacker.train.algorithms.reinforce_pp import ReinforcePP
from rollpacker.train.algorithms.rloo import RLOO

__all__ = ["ALGORITHMS", "Algorithm", "Responses", "Rewarded", "build"]

ALGORITHMS: dict[type[Config], type[Algorithm]] = {
    configs.GRPOConfig: GRPO,
    configs.DrGRPOConfig: DrGRPO,
    configs.DAPOConfig: DAPO,
    configs.RLOOConfig: RLOO,
    configs.ReinforcePPConfig: ReinforcePP,
    configs.GSPOConfig: GSPO,
}
"""The algorithm of each configuration."""


def build(config: AlgorithmConfig, min_reward_range: float = 0.0) -> Algorithm:
    """The algorithm that a configuration describes.

    ``min_reward_range`` is that of the rollout: rewards closer together count as equal.
    """
    return ALGORITHMS[type(config)](config, min_reward_range)
