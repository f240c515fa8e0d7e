"""The loss of a micro-batch, and the metrics from the sums over all of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rollpacker.config import SamplerCorrectionConfig, TrainConfig
from rollpacker.train.algorithms import Algorithm, Responses
from rollpacker.train.base import RATIO, TRAINED, Partial
from rollpacker.train.model.packing import MicroBatch
from rollpacker.train.model.token_logprobs import k3

AGREEMENT = (
    "sampler/k3",
    "sampler/abs_logprob_difference",
    RATIO,
    "sampler/outside",
    "sampler/weight",
    "sampler/squared_weight",
    "sampler/perplexity_ratio",
    "sampler/responses",
)
"""Sums over tokens, the last two over responses."""
_LARGEST_EXPONENT = 20.0


@dataclass(frozen=True, slots=True, eq=False)
class Agreement:
    """Results of ``agreement`` for a micro-batch.

    Args:
        weights: importance weights, shape (N,). With ``kind`` ``none`` the plain ratios.
        sums: by ``AGREEMENT``.
        extremes: largest ratio of a token, and the smallest one negated, shape (2,).
    """

    weights: torch.Tensor
    sums: torch.Tensor
    extremes: torch.Tensor


def agreement(
    trainer: torch.Tensor,
    sampler: torch.Tensor,
    owner: torch.Tensor,
    lengths: torch.Tensor,
    config: SamplerCorrectionConfig,
) -> Agreement:
    """Importance weights, and how far the sampler's probabilities are from the trainer's.

    Both are under the weights that sampled, so any difference is arithmetic or an error. Nothing
    here carries a gradient.

    Truncated importance sampling: Yao et al., "Your Efficient RL Framework Secretly Brings You
    Off-Policy RL Training" (2025). ``mask``: IcePop (Ring-1T, arXiv 2510.18855).

    Args:
        trainer: its logprobs under the weights that sampled, shape (N,), nats.
        sampler: the sampler's own logprobs, shape (N,).
        owner: the response of each token, shape (N,), int64.
        lengths: sampled tokens of each response, shape (S,), at least 1.
    """
    trainer = trainer.detach()
    log_ratio = trainer - sampler
    whole = log_ratio.new_zeros(len(lengths)).index_add(0, owner, log_ratio)
    mean = whole / lengths
    at_level = {"token": log_ratio, "sequence": whole[owner], "geometric": mean[owner]}
    ratio = _exp(at_level[config.level])
    inside = (ratio >= config.low) & (ratio <= config.high)
    weights = ratio
    if config.kind == "truncate":
        weights = ratio.clamp(max=config.high)
    elif config.kind == "mask":
        weights = torch.where(inside, ratio, 0.0)
    token_ratio = _exp(log_ratio)
    values = (
        k3(sampler, trainer),
        log_ratio.abs(),
        token_ratio,
        (~inside).float(),
        weights,
        weights.square(),
        _exp(-mean),
        torch.ones_like(mean),
    )
    return Agreement(
        weights=weights,
        sums=torch.stack([value.sum() for value in values]),
        extremes=torch.stack((token_ratio.max(), -token_ratio.min())),
    )


def _exp(log_ratio: torch.Tensor) -> torch.Tensor:
    return log_ratio.clamp(-_LARGEST_EXPONENT, _LARGEST_EXPONENT).exp()


SUMS = ("loss", "clip_low", "clip_high", "kl", *TRAINED, *AGREEMENT)
"""Sums over micro-batches, members and replicas."""
NO_EXTREMES = (float("-inf"), float("-inf"))  # extremes without a token (see ``Agreement``)
_RUN = "tokens_run"  # Sampled tokens that were run. Samples without a gradient are not.


@dataclass(frozen=True, slots=True, eq=False)
class BatchLoss:
    """One micro-batch, un-normalised: ``loss`` with its gradient, sums by ``SUMS``, and
    extremes."""

    loss: torch.Tensor
    sums: torch.Tensor
    extremes: torch.Tensor


def batch_loss(
    batch: MicroBatch,
    logprobs: torch.Tensor,
    entropy: torch.Tensor,
    reference: torch.Tensor | None,
    algorithm: Algorithm,
    config: TrainConfig,
) -> BatchLoss:
    """The loss of a micro-batch.

    Args:
        logprobs: of the targets under the weights being trained, shape (T,), differentiable.
        entropy: shape (T,).
        reference: logprobs of the reference model, shape (T,). None without a KL term.
    """
    now = logprobs.detach()
    old = now if batch.old_logprobs is None else batch.old_logprobs
    responses = Responses(
        logprobs=logprobs,
        old=old,
        advantages=batch.advantages,
        lengths=batch.lengths,
        owner=batch.owner,
    )
    losses, clipped = algorithm.surrogate(responses)
    kl = now.new_zeros(())
    corrected = config.sampler_correction.kind != "none"
    sampler, extremes = (
        now.new_zeros(len(AGREEMENT)),
        now.new_tensor(NO_EXTREMES),
    )
    # Without a correction the old log-probabilities may be the sampler's own.
    if corrected or batch.old_logprobs is None:
        found = agreement(
            old, batch.sampler_logprobs, batch.owner, batch.lengths, config.sampler_correction
        )
        sampler, extremes = found.sums, found.extremes
        losses = losses * found.weights if corrected else losses
    if reference is not None:
        divergence = k3(logprobs, reference)
        if config.kl_bias_correction:
            divergence = divergence * algorithm.ratio(responses)
        losses = losses + config.beta * divergence
        kl = divergence.detach().sum()
    if batch.fresh is not None:
        losses = losses * batch.fresh
    loss = torch.dot(losses, algorithm.weights(batch.lengths)[batch.owner])
    if algorithm.sequence_level:
        clipped = clipped / batch.lengths[batch.owner]
    up = batch.advantages[batch.owner] > 0
    ratio = torch.exp(now - old).sum()
    difference = (now - batch.sampler_logprobs).abs().sum()
    bounds = clipped[~up].sum(), clipped[up].sum()
    sums = torch.stack((loss.detach(), *bounds, kl, entropy.sum(), ratio, difference))
    return BatchLoss(loss=loss, sums=torch.cat((sums, sampler)), extremes=extremes)


def measured(sums: torch.Tensor, extremes: torch.Tensor, run: int) -> Partial:
    """Metrics of ``run`` sampled tokens, from the sums and extremes of ``BatchLoss``."""
    top, bottom = extremes.tolist()
    return Partial(
        normaliser=0.0,
        tokens=0,
        sums=dict(zip(SUMS, sums.tolist(), strict=True)) | {_RUN: float(run)},
        ranges={RATIO: (-bottom, top)} if (top, bottom) != NO_EXTREMES else {},
    )


def metrics(total: Partial, algorithm: Algorithm, config: TrainConfig) -> dict[str, float]:
    """Means over all tokens of the loss, or responses. ``trained_tokens/*`` and ``sampler/*`` are
    over the tokens that were run."""
    sums, count = total.sums, total.samples if algorithm.sequence_level else total.tokens
    low, high = (sums.get(f"clip_{side}", 0.0) / max(count, 1) for side in ("low", "high"))
    result = {
        "loss": sums.get("loss", 0.0) / (total.normaliser or 1.0),
        "clip_ratio/low_mean": low,
        "clip_ratio/high_mean": high,
        "clip_ratio/region_mean": low + high,
    }
    if config.beta > 0:
        result["kl"] = sums.get("kl", 0.0) / max(total.tokens, 1)
    if sums.get(_RUN):
        result |= {f"trained_tokens/{name}": sums[name] / sums[_RUN] for name in TRAINED}
    return result | _agreement(total)


def _agreement(total: Partial) -> dict[str, float]:
    sums = total.sums
    if not sums.get("sampler/responses"):
        return {}
    tokens, weight = sums[_RUN], sums["sampler/weight"]
    smallest, largest = total.ranges[RATIO]
    shares = ("sampler/k3", "sampler/abs_logprob_difference", "sampler/outside")
    spread = tokens * sums["sampler/squared_weight"]
    return {
        **{name: sums[name] / tokens for name in shares},
        f"{RATIO}_mean": sums[RATIO] / tokens,
        f"{RATIO}_min": smallest,
        f"{RATIO}_max": largest,
        "sampler/effective_sample_size": min(1.0, weight**2 / spread) if spread else 0.0,
        "sampler/perplexity_ratio": sums["sampler/perplexity_ratio"] / sums["sampler/responses"],
    }
