"""The mathematics reward: extract the final answer, read both sides, compare them."""

from rollpacker.reward.math.reward import MathReward

__all__ = ["MathReward"]
