"""DAPO (Yu et al., 2025, arXiv 2503.14476): clip-higher, token-level loss, overlong shaping."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollpacker.config import DAPOConfig
from rollpacker.train.algorithms.base import GroupScaled


@dataclass(frozen=True)
class DAPO(GroupScaled):
    """GRPO's advantage of shaped rewards, with a wider upper clip range.

    Dynamic sampling is the rollout's part: it drops groups that are not informative.
    """

    config: DAPOConfig

    def shaped(
        self, rewards: NDArray[np.float64], lengths: NDArray[np.int64], max_length: int
    ) -> NDArray[np.float64]:
        """See ``Algorithm``; the overlong punishment is added."""
        return rewards + self.punishment(lengths, max_length)

    def punishment(self, lengths: NDArray[np.int64], max_length: int) -> NDArray[np.float64]:
        """Soft overlong punishment, equation 13: 0 down to ``-overlong_penalty`` at the cap."""
        buffer = self.config.overlong_buffer
        if buffer == 0:
            return np.zeros(len(lengths))
        share = (np.asarray(lengths) - (max_length - buffer)) / buffer
        return -self.config.overlong_penalty * np.clip(share, 0.0, 1.0)
