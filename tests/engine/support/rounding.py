"""Responses of two engines that must be equal, but where rounding decides."""

import numpy as np

from rollpacker.engine.base import uniforms
from rollpacker.engine.sampling.race import CHUNK, keys, places, times

NEAR = 1e-4
"""How near to another outcome a draw must lie for rounding to decide."""
SHARE = 0.001
"""Of all tokens, at most so many are decided by rounding."""


def assert_same(model, asked, found, wanted) -> None:
    """By attempt: tokens up to a first that rounding explains, and the log-probabilities of those.

    What follows such a token is another response: it is not compared.
    """
    compared = differ = 0
    for each in asked:
        one, other = found[each.attempt], wanted[each.attempt]
        at = first_difference(one.tokens, other.tokens)
        np.testing.assert_allclose(one.logprobs[:at], other.logprobs[:at], atol=1e-4)
        compared += at
        if at < max(len(one.tokens), len(other.tokens)):
            assert distance(model, each, one.tokens, at) < NEAR, (each.attempt, at)
            compared, differ = compared + 1, differ + 1
    assert differ <= SHARE * compared, (differ, compared)


def first_difference(one, other) -> int:
    size = min(len(one), len(other))
    differ = np.flatnonzero(one[:size] != other[:size])
    return int(differ[0]) if len(differ) else size


def distance(model, asked, tokens, at) -> float:
    """How far the draw of the token at this place is from another outcome."""
    import torch

    ids = torch.from_numpy(np.concatenate([asked.prompt, tokens[:at]]).astype(np.int64))[None]
    with torch.no_grad():
        logits = model(ids).logits[0, -1].double().numpy()
    return margin(logits, asked.params, uniforms(asked.seed, at - at % 4, 4)[at % 4])


def margin(logits, params, uniform) -> float:
    """Of a greedy choice in logits; else of the two clocks that ring first, relative, or of the
    nucleus's end in probability."""
    order = np.argsort(-logits, kind="stable")
    if params.temperature == 0:
        return float(logits[order[0]] - logits[order[1]])
    weights = np.exp((logits - logits.max()) / params.temperature)
    kept = order[: params.top_k or None]
    shares = weights[kept] / weights[kept].sum()
    before = np.cumsum(shares) - shares
    edges = np.abs(before[1:] - params.top_p) if params.top_p < 1 else np.ones(1)
    weights[np.setdiff1d(order, kept[before < params.top_p])] = 0.0
    rings = times(keys(np.array([uniform])), places(len(weights)))
    assert len(weights) <= CHUNK
    return min(float(edges.min()), lead(weights / rings))


def lead(speeds) -> float:
    """Of the first over the second, relative."""
    second, first = np.sort(np.append(speeds, 0.0))[-2:]
    return float(1.0 - second / first)
