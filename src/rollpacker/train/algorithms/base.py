"""What an algorithm decides: advantages, the surrogate loss of a token, and the normaliser."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from rollpacker.policy.race import MIN_REWARD_RANGE

Floats = NDArray[np.float32]

_STD_EPSILON = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Responses:
    """The response tokens of a micro-batch, responses one after the other, without padding.

    Args:
        logprobs: of the weights being trained, shape (N,), differentiable.
        old: of the weights that sampled them, shape (N,).
        advantages: of each response, shape (S,).
        lengths: tokens of each response, shape (S,), int64.
        owner: the response of each token, shape (N,), int64.
    """

    logprobs: torch.Tensor
    old: torch.Tensor
    advantages: torch.Tensor
    lengths: torch.Tensor
    owner: torch.Tensor

    def sequence_sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum of per-token values (N,) over each response, shape (S,)."""
        return values.new_zeros(len(self.lengths)).index_add(0, self.owner, values)


class Algorithm(ABC):
    """One policy-gradient algorithm.

    The un-normalised loss of a batch is the sum over tokens of
    ``weights[response] * (surrogate + beta * kl)``; the update divides it by the sum of the
    normalisers of all samples, those without a gradient included.
    """

    needs_batch: ClassVar[bool] = False
    """Whether advantages are known only with the whole batch (``batch_advantages``)."""

    @abstractmethod
    def advantages(self, rewards: Floats, lengths: NDArray[np.int64], max_length: int) -> Floats:
        """Advantages of one group, shape (G,), from its rewards and response lengths (G,).

        All zero when the group is not informative.
        """

    def batch_advantages(self, groups: Sequence[Floats]) -> list[Floats]:
        """Final advantages of a batch from those of its groups."""
        return list(groups)

    @abstractmethod
    def surrogate(self, responses: Responses) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss of each token, and whether its ratio was clipped; both of shape (N,)."""

    def weights(self, lengths: torch.Tensor) -> torch.Tensor:
        """Weight of every token of a response, shape (S,), from the lengths (S,)."""
        return torch.ones(len(lengths), device=lengths.device)

    def normaliser(self, tokens: int, samples: int, max_length: int) -> float:
        """What some samples with ``tokens`` response tokens add to the divisor."""
        del samples, max_length
        return float(tokens)


def informative(rewards: Floats) -> bool:
    """Whether rewards differ by 1e-3 or more.

    The range is compared, not the advantages: rounding makes those of equal rewards non-zero.
    """
    return len(rewards) > 0 and float(np.ptp(rewards)) >= MIN_REWARD_RANGE


def centred(rewards: Floats) -> Floats:
    """Rewards less their mean; zeros for a group that is not informative."""
    if not informative(rewards):
        return np.zeros(len(rewards), np.float32)
    values = np.asarray(rewards, np.float64)
    return (values - values.mean()).astype(np.float32)


def standardised(rewards: Floats) -> Floats:
    """Rewards less their mean, over their sample standard deviation (``ddof=1``, as TRL)."""
    if not informative(rewards):
        return np.zeros(len(rewards), np.float32)
    values = np.asarray(rewards, np.float64)
    return ((values - values.mean()) / (values.std(ddof=1) + _STD_EPSILON)).astype(np.float32)


def clipped(
    ratio: torch.Tensor, advantages: torch.Tensor, low: float, high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """PPO's clipped loss ``-min(rA, clip(r, 1-low, 1+high)A)`` and where the clip binds."""
    plain = ratio * advantages
    bounded = ratio.clamp(1.0 - low, 1.0 + high) * advantages
    return -torch.minimum(plain, bounded), (bounded < plain).to(ratio.dtype)


def token_surrogate(
    responses: Responses, low: float, high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The clipped loss with one probability ratio per token."""
    ratio = torch.exp(responses.logprobs - responses.old)
    return clipped(ratio, responses.advantages[responses.owner], low, high)
