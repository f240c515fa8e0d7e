"""Policy-gradient algorithms: advantages, the surrogate loss of a token, and the normaliser."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from rollpacker.config import AlgorithmConfig
from rollpacker.config import train as configs
from rollpacker.config.base import Config
from rollpacker.core.groups import differ

Floats = NDArray[np.float32]

_WHITEN_EPSILON = 1e-8  # added to the variance, as in verl's ``masked_whiten``
_TRL_EPSILON = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Responses:
    """The sampled tokens of a micro-batch, responses one after the other, without padding.

    Args:
        logprobs: under the weights being trained, shape (N,), differentiable.
        old: under the weights that sampled them, shape (N,).
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
    """One group as the whole batch sees it. Every array has shape (G,).

    Args:
        rewards: shaped by the algorithm, float64. nan if no reward function applies.
        tokens: sampled tokens that count in the loss, int64.
        advantages: of the group by itself, 0 without a reward.
    """

    rewards: NDArray[np.float64]
    tokens: NDArray[np.int64]
    advantages: Floats


@dataclass(frozen=True)
class Algorithm:
    """One policy-gradient algorithm.

    The un-normalised loss of a batch is the sum over tokens of ``weights[response] * (surrogate +
    beta * kl)``. The update divides it by the sum of the normalisers of all samples, those without
    a gradient included. Rewards closer together than ``min_reward_range`` count as equal.
    """

    sequence_level: ClassVar[bool] = False
    """Whether a response has one ratio, so that clipping is counted per response."""

    config: Any
    min_reward_range: float = 0.0

    @property
    def needs_batch(self) -> bool:
        """Whether advantages need the whole batch (``batch_advantages``)."""
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
        """One group's ``rewards`` (nan for none), and its advantages as far as they are known. All
        arrays have shape (G,). ``lengths`` are sampled tokens, at most ``max_length``. ``masked``
        responses are left out of the loss, but their rewards count."""
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
        """Rewards plus the algorithm's own terms, shape (G,)."""
        del lengths, max_length
        return rewards

    def advantages(self, rewards: NDArray[np.float64]) -> Floats:
        """Advantages of one group: by default rewards less their mean, zeros if they do not
        differ."""
        return self._differences(rewards).astype(np.float32)

    def batch_advantages(self, groups: Sequence[Rewarded]) -> list[Floats]:
        return [group.advantages for group in groups]

    def surrogate(self, responses: Responses) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss of each token, and whether its ratio was clipped, both (N,). By default of one ratio
        for each token."""
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
        """The samples' part of the divisor: tokens, or responses if each has one ratio."""
        del max_length
        return float(samples if self.sequence_level else tokens)

    def _differences(self, rewards: NDArray[np.float64]) -> NDArray[np.float64]:
        if not differ(rewards.tolist(), self.min_reward_range):
            return np.zeros(len(rewards))
        return rewards - rewards.mean()


@dataclass(frozen=True)
class GroupScaled(Algorithm):
    """Advantages are centred rewards over a standard deviation, according to ``scale_rewards``."""

    @property
    def needs_batch(self) -> bool:
        return self.config.scale_rewards == "batch"

    def advantages(self, rewards: NDArray[np.float64]) -> Floats:
        """Deviations are the sample's (``ddof=1``), as in TRL and verl."""
        values = self._differences(rewards)
        if self.config.scale_rewards != "group" or not values.any():
            return values.astype(np.float32)
        return (values / (rewards.std(ddof=1) + self.config.std_epsilon)).astype(np.float32)

    def batch_advantages(self, groups: Sequence[Rewarded]) -> list[Floats]:
        if self.needs_batch:
            return over_batch_std(groups, self.config.std_epsilon)
        return super().batch_advantages(groups)


@dataclass(frozen=True)
class GRPO(GroupScaled):
    """GRPO (Shao et al., 2024, arXiv 2402.03300): advantage ``(r - mean) / std`` in the group,
    averaged over tokens or responses."""

    config: configs.GRPOConfig

    def weights(self, lengths: torch.Tensor) -> torch.Tensor:
        if self.config.loss_type == "token_mean":
            return super().weights(lengths)
        return 1.0 / lengths

    def normaliser(self, tokens: int, samples: int, max_length: int) -> float:
        del max_length
        return float(tokens if self.config.loss_type == "token_mean" else samples)


@dataclass(frozen=True)
class DrGRPO(Algorithm):
    """Dr. GRPO (Liu et al., 2025, arXiv 2503.20783): advantage ``r - mean``, token sums over the
    constant ``samples * max_length``."""

    config: configs.DrGRPOConfig

    def normaliser(self, tokens: int, samples: int, max_length: int) -> float:
        del tokens
        return float(samples * max_length)


@dataclass(frozen=True)
class DAPO(GroupScaled):
    """DAPO (Yu et al., 2025, arXiv 2503.14476): GRPO's advantage of shaped rewards, and a wider
    upper clip range. The rollout does the dynamic sampling."""

    config: configs.DAPOConfig

    def shaped(
        self, rewards: NDArray[np.float64], lengths: NDArray[np.int64], max_length: int
    ) -> NDArray[np.float64]:
        return rewards + self.punishment(lengths, max_length)

    def punishment(self, lengths: NDArray[np.int64], max_length: int) -> NDArray[np.float64]:
        """Soft overlong punishment, equation 13: 0 down to ``-overlong_penalty`` at the cap."""
        buffer = self.config.overlong_buffer
        if buffer == 0:
            return np.zeros(len(lengths))
        share = (np.asarray(lengths) - (max_length - buffer)) / buffer
        return -self.config.overlong_penalty * np.clip(share, 0.0, 1.0)


@dataclass(frozen=True)
class RLOO(Algorithm):
    """RLOO (Ahmadian et al., 2024, arXiv 2402.14740): REINFORCE with a leave-one-out baseline. The
    whole response is one action: one ratio, one advantage, mean over responses."""

    sequence_level: ClassVar[bool] = True

    config: configs.RLOOConfig

    def advantages(self, rewards: NDArray[np.float64]) -> Floats:
        """``r_i`` less the mean of the others, which is ``(r_i - mean) * G / (G - 1)``."""
        count = len(rewards)
        return super().advantages(rewards) * np.float32(count / max(count - 1, 1))

    def surrogate(self, responses: Responses) -> tuple[torch.Tensor, torch.Tensor]:
        ratio = torch.exp(responses.sequence_sum(responses.logprobs - responses.old))
        epsilon = self.config.epsilon
        loss, bound = clipped(ratio, responses.advantages, epsilon, epsilon)
        return (loss / responses.lengths)[responses.owner], bound[responses.owner]


@dataclass(frozen=True)
class ReinforcePP(Algorithm):
    """REINFORCE++ (Hu, 2025, arXiv 2501.03262), the variant with the group's mean as baseline:
    advantage ``r - group mean``, normalised over the whole batch."""

    config: configs.ReinforcePPConfig

    @property
    def needs_batch(self) -> bool:
        return True

    @property
    def trains_equal(self) -> bool:
        """Whitening over tokens moves the mean, as longer responses weigh more in it."""
        return self.config.whiten == "tokens"

    def batch_advantages(self, groups: Sequence[Rewarded]) -> list[Floats]:
        if not groups:
            return []
        match self.config.whiten:
            case "tokens":
                return _token_whitened(groups)
            case "batch":
                return over_batch_std(groups, _TRL_EPSILON)
            case "responses":
                values = np.concatenate([g.advantages[~np.isnan(g.rewards)] for g in groups])
                std = np.sqrt(np.square(values, dtype=np.float64).sum() / max(len(values), 1))
                scale = std + _WHITEN_EPSILON
                return [(g.advantages / scale).astype(np.float32) for g in groups]


@dataclass(frozen=True)
class GSPO(GroupScaled):
    """GSPO (Zheng et al., 2025, arXiv 2507.18071): GRPO's advantage, one ratio ``exp(mean(logp -
    old))`` per response, mean over responses."""

    sequence_level: ClassVar[bool] = True

    config: configs.GSPOConfig

    def surrogate(self, responses: Responses) -> tuple[torch.Tensor, torch.Tensor]:
        low, high = self.config.epsilon, self.config.epsilon_high
        loss, bound = clipped(self._ratios(responses), responses.advantages, low, high)
        return loss[responses.owner], bound[responses.owner]

    def ratio(self, responses: Responses) -> torch.Tensor:
        return self._ratios(responses)[responses.owner]

    def _ratios(self, responses: Responses) -> torch.Tensor:
        log_ratio = responses.sequence_sum(responses.logprobs - responses.old)
        return torch.exp(log_ratio / responses.lengths)

    def weights(self, lengths: torch.Tensor) -> torch.Tensor:
        return 1.0 / lengths


def over_batch_std(groups: Sequence[Rewarded], epsilon: float) -> list[Floats]:
    """Advantages over the standard deviation of all rewards (TRL, ``scale_rewards="batch"``)."""
    rewards = np.concatenate([group.rewards for group in groups]) if groups else np.empty(0)
    known = rewards[~np.isnan(rewards)]
    std = known.std(ddof=1) if len(known) > 1 else 0.0
    if std == 0.0:  # all advantages are 0, and so may be epsilon
        return [group.advantages for group in groups]
    return [(g.advantages / (std + epsilon)).astype(np.float32) for g in groups]


def _token_whitened(groups: Sequence[Rewarded]) -> list[Floats]:
    """Mean 0 and variance 1 over the tokens of the loss (``ddof=1``), as in verl."""
    known = [~np.isnan(group.rewards) for group in groups]
    tokens = np.concatenate([g.tokens * k for g, k in zip(groups, known, strict=True)])
    values = np.concatenate([group.advantages for group in groups]).astype(np.float64)
    count = tokens.sum()
    if count < 2:
        return [np.zeros(len(group.advantages), np.float32) for group in groups]
    mean = float(tokens @ values) / count
    variance = float(tokens @ (values - mean) ** 2) / (count - 1)
    scale = 1.0 / np.sqrt(variance + _WHITEN_EPSILON)
    return [
        np.where(k, (g.advantages - mean) * scale, 0.0).astype(np.float32)
        for g, k in zip(groups, known, strict=True)
    ]


def clipped(
    ratio: torch.Tensor,
    advantages: torch.Tensor,
    low: float,
    high: float,
    delta: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """PPO's clipped loss ``-min(rA, clip(r, 1-low, 1+high)A)`` and where the clip binds. ``delta``
    bounds the first ratio (dual clip)."""
    plain = (ratio if delta is None else ratio.clamp(max=delta)) * advantages
    bounded = ratio.clamp(1.0 - low, 1.0 + high) * advantages
    return -torch.minimum(plain, bounded), (bounded < plain).to(ratio.dtype)


ALGORITHMS: dict[type[Config], type[Algorithm]] = {
    configs.GRPOConfig: GRPO,
    configs.DrGRPOConfig: DrGRPO,
    configs.DAPOConfig: DAPO,
    configs.RLOOConfig: RLOO,
    configs.ReinforcePPConfig: ReinforcePP,
    configs.GSPOConfig: GSPO,
}


def build(config: AlgorithmConfig, min_reward_range: float = 0.0) -> Algorithm:
    """The algorithm that a configuration describes. ``min_reward_range`` is the rollout's."""
    return ALGORITHMS[type(config)](config, min_reward_range)
