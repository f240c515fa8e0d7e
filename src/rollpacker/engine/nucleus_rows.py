"""Sampling of many rows at once, on their device: from all tokens, or by top-k and top-p."""

from __future__ import annotations

import torch


def plain_draws(
    logits: torch.Tensor, temperature: torch.Tensor, uniform: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample each row by inverse CDF in float64; temperature 0 is greedy.

    Shapes as of ``restricted_draws``. Returns tokens, int64, and their logprobs, each (n,).
    """
    greedy = temperature == 0
    scaled = logits / torch.where(greedy, 1.0, temperature)[:, None]
    logprobs = scaled.log_softmax(-1)
    mass = logprobs.double().exp().cumsum(-1)
    sampled = torch.searchsorted(mass, uniform[:, None] * mass[:, -1:], right=True)[:, 0]
    sampled = sampled.clamp(max=logits.shape[1] - 1)
    tokens = torch.where(greedy, scaled.argmax(-1), sampled)
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]


def restricted_draws(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    uniform: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample each row as ``mini.draw.restricted_draw`` does, but for rounding of sums.

    Args:
        logits: shape (n, vocabulary).
        temperature: above 0, shape (n,), as all that follow.
        top_k: most likely tokens kept, 0 for all; integers.
        top_p: nucleus mass, float64.
        uniform: in [0, 1), float64.

    Returns tokens, int64, and their logprobs, float64, each (n,).
    """
    weights = logits.double()
    weights /= temperature.double()[:, None]
    weights -= weights.amax(-1, keepdim=True)
    weights.exp_()
    ids = _most_likely(weights, top_k, top_p)
    kept = weights.gather(1, ids.clamp(max=weights.shape[1] - 1))
    kept[ids == weights.shape[1]] = 0.0
    mass = kept.cumsum(-1)
    total = mass[:, -1:]
    # Never past the last token that is kept, where the product is rounded up to all.
    target = torch.minimum(uniform[:, None] * total, total.nextafter(torch.zeros_like(total)))
    place = torch.searchsorted(mass, target, right=True)
    return ids.gather(1, place)[:, 0], (kept.gather(1, place) / total).log()[:, 0]


def _most_likely(weights: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Ids that are kept, the first in order of weights and then of ids: each row in order of ids,
    filled up with the size of the vocabulary."""
    size = weights.shape[1]
    limit = torch.where((top_k > 0) & (top_k < size), top_k, size)
    total = weights.sum(-1)
    # Tokens below this share add up to less than 1 - top_p: none of them is in the nucleus.
    share = (total * (1.0 - top_p) / size)[:, None]
    likely = (weights >= share).sum(-1, dtype=torch.int32)
    longest = int(torch.where(limit < size, limit, likely).max())
    ordered, ids = weights.topk(min(longest + 1, size))
    mass = ordered.cumsum(-1)
    last = (limit.clamp(max=longest) - 1)[:, None]
    whole = torch.where(limit < size, mass.gather(1, last)[:, 0], total)
    nucleus = torch.searchsorted(mass, (top_p * whole)[:, None])[:, 0] + 1
    count = torch.where(top_p < 1.0, torch.minimum(nucleus, limit), limit).clamp(max=longest)
    least = ordered.gather(1, count[:, None] - 1)
    ids.masked_fill_(torch.arange(ids.shape[1], device=ids.device) >= count[:, None], size)
    # Of more equal weights than are kept topk has taken any.
    tied = (ordered >= least).sum(-1) > count
    if bool(tied.any()):
        ids[tied] = _lowest(weights[tied], least[tied], count[tied], ids.shape[1])
    return ids.sort(-1).values


def _lowest(
    weights: torch.Tensor, least: torch.Tensor, count: torch.Tensor, width: int
) -> torch.Tensor:
    """The same for rows where the last of the ``count`` that are kept, ``least``, has equals."""
    above, equal = weights > least, weights == least
    places = (count - above.sum(-1))[:, None]
    kept = above | (equal & (equal.cumsum(-1, dtype=torch.int32) <= places))
    every = torch.arange(weights.shape[1], device=weights.device)
    found = torch.where(kept, every, weights.shape[1])
    return found.topk(width, largest=False).values
