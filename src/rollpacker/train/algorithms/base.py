"""What an algorithm decides: advantages, the surrogate loss of a token, and the normaliser."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from rollpacker.core.groups import differ

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Responses:
    """The sampled tokens of a micro-batch, responses one after the other, without padding.

    Args:
        logprobs: of the weights being trained, shape (N,), differentiable.
        old: of the weights that sampled them, shape (N,).
        advantages: of each response, shape (S,).
        lengths: sampled tokens of each response, shape (S,), int64, at least 1.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewarded:
    """One group as the whole batch sees it; every array has shape (G,).

    Args:
        rewards: shaped by the algorithm, float64; nan where no reward function applies.
        tokens: that count in the loss, int64: sampled ones.
        advantages: of the group by itself; 0 where there is no reward.
    """

    rewards: NDArray[np.float64]
    tokens: NDArray[np.int64]
    advantages: Floats


@dataclass(frozen=True)
class Algorithm:
    """One policy-gradient algorithm.

    The un-normalised loss of a batch is the sum over tokens of
    ``weights[response] * (surrogate + beta * kl)``; the update divides it by the sum of the
    normalisers of all samples, those without a gradient included.

    Args:
        config: its member of ``AlgorithmConfig``.
        min_reward_range: rewards closer together count as equal (``core.groups.differ``).
    """

    sequence_level: ClassVar[bool] = False
    """Whether a response has one ratio, so that clipping is counted by responses."""

    config: Any
    min_reward_range: float = 0.0

    @property
    def needs_batch(self) -> bool:
        """Whether advantages are known only with the whole batch (``batch_advantages``)."""
        return False

    @property
    def trains_equal(self) -> bool:
        """Whether groups of equal rewards have a gradient too."""
        return False

    def reward(
        self,
        rewards: NDArray[np.float64],
        lengths: NDArray[np.int64],
        max_length: int,
        masked: NDArray[np.bool_] | None = None,
    ) -> Rewarded:
        """One group's rewards (nan for none), and its advantages as far as they are known.

        Args:
            rewards: shape (G,).
            lengths: sampled tokens of the responses, shape (G,).
            max_length: the cap, tokens.
            masked: which responses are left out of the loss, shape (G,); their rewards count.
        """
        shaped = self.shaped(np.asarray(rewards, np.float64), lengths, max_length)
        known = ~np.isnan(shaped)
        advantages = np.zeros(len(shaped), np.float32)
        if known.any():
            advantages[known] = self.advantages(shaped[known])
        tokens = np.asarray(lengths, np.int64) if masked is None else np.where(masked, 0, lengths)
        return Rewarded(rewards=shaped, tokens=tokens, advantages=advantages)

    def shaped(
        self, rewards: NDArray[np.float64], lengths: NDArray[np.int64], max_length: int
    ) -> NDArray[np.float64]:
        """Rewards with what the algorithm adds to them, shape (G,)."""
        del lengths, max_length
        return rewards

    def advantages(self, rewards: NDArray[np.float64]) -> Floats:
        """Advantages of one group from its shaped rewards; zeros where those do not differ."""
        return self.centred(rewards)

    def batch_advantages(self, groups: Sequence[Rewarded]) -> list[Floats]:
        """Final advantages of a batch's groups."""
        return [group.advantages for group in groups]

    def surrogate(self, responses: Responses) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss of each token, and whether its ratio was clipped; both of shape (N,).

        Here of one ratio for each token, between the bounds of ``TokenClip``.
        """
        config, advantages = self.config, responses.advantages[responses.owner]
        high = getattr(config, "epsilon_high", config.epsilon)
        return clipped(self.ratio(responses), advantages, config.epsilon, high, config.delta)

    def ratio(self, responses: Responses) -> torch.Tensor:
        """Probability ratio that corrects a token's KL term, shape (N,), differentiable."""
        return torch.exp(responses.logprobs - responses.old)

    def weights(self, lengths: torch.Tensor) -> torch.Tensor:
        """Weight of every token of a response, shape (S,), from the lengths (S,)."""
        return torch.ones(len(lengths), device=lengths.device)

    def normaliser(self, tokens: int, samples: int, max_length: int) -> float:
        """What some samples with ``tokens`` sampled tokens add to the divisor.

        Tokens, or responses where each has one ratio.
        """
        del max_length
        return float(samples if self.sequence_level else tokens)

    def centred(self, rewards: NDArray[np.float64]) -> Floats:
        """Rewards less their mean; zeros where they do not differ."""
        return self._differences(rewards).astype(np.float32)

    def _differences(self, rewards: NDArray[np.float64]) -> NDArray[np.float64]:
        if not differ(rewards.tolist(), self.min_reward_range):
            return np.zeros(len(rewards))
        return rewards - rewards.mean()


@dataclass(frozen=True)
class GroupScaled(Algorithm):
    """Advantages are centred rewards over a standard deviation, as ``scale_rewards`` says."""

    @property
    def needs_batch(self) -> bool:
        """The standard deviation of the batch is that of all its rewards."""
        return self.config.scale_rewards == "batch"

    def advantages(self, rewards: NDArray[np.float64]) -> Floats:
        """See ``Algorithm``; deviations are the sample's (``ddof=1``), as in TRL and verl."""
        values = self._differences(rewards)
        if self.config.scale_rewards != "group" or not values.any():
            return values.astype(np.float32)
        return (values / (rewards.std(ddof=1) + self.config.std_epsilon)).astype(np.float32)

    def batch_advantages(self, groups: Sequence[Rewarded]) -> list[Floats]:
        """See ``Algorithm``."""
        if self.needs_batch:
            return over_batch_std(groups, self.config.std_epsilon)
        return super().batch_advantages(groups)


def over_batch_std(groups: Sequence[Rewarded], epsilon: float) -> list[Floats]:
    """Advantages over the standard deviation of all rewards (TRL, ``scale_rewards="batch"``)."""
    rewards = np.concatenate([group.rewards for group in groups]) if groups else np.empty(0)
    known = rewards[~np.isnan(rewards)]
    std = known.std(ddof=1) if len(known) > 1 else 0.0
    if std == 0.0:  # all advantages are 0, and so may be epsilon
        return [group.advantages for group in groups]
    return [(g.advantages / (std + epsilon)).astype(np.float32) for g in groups]


def clipped(
    ratio: torch.Tensor,
    advantages: torch.Tensor,
    low: float,
    high: float,
    delta: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """PPO's clipped loss ``-min(rA, clip(r, 1-low, 1+high)A)`` and where the clip binds.

    With ``delta`` the first ratio is at most that (dual clip).
    """
    plain = (ratio if delta is None else ratio.clamp(max=delta)) * advantages
    bounded = ratio.clamp(1.0 - low, 1.0 + high) * advantages
    return -torch.minimum(plain, bounded), (bounded < plain).to(ratio.dtype)
