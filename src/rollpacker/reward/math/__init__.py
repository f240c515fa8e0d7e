"""The mathematics reward: extract the final answer, read both sides, compare them.

It knows nothing of grading processes but the ``Host`` that it shows signs of life.
"""

from rollpacker.reward.math.reward import MathReward

__all__ = ["MathReward"]
