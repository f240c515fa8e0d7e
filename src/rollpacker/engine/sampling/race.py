"""A draw is a race of exponential clocks with rates ``w``. Clock ``i`` rings first with probability
``w[i] / sum(w)``.

There are two races, so that few numbers are needed: chunks of ids run with the sums of their
weights, then the ids of the winning chunk. A weight's rounding error changes a draw only in a near
tie. With a running sum (inverse CDF) it would move the bounds of all later ids. (Gumbel-max is the
logarithm of a race: Maddison et al., "A* sampling", 2014.)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

CHUNK = 256  # Ids of a chunk. Another value would change the samples of every seed.

GOLDEN, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""SplitMix64's constants (Steele et al., 2014). Its numbers are ``mix(key + n * GOLDEN)``."""

SHARE = 2.0**-52


class RowDraws(NamedTuple):
    """How each row is drawn, shape (n,). ``uniform`` is each token's number in its seed's
    stream."""

    temperature: NDArray[np.float32]
    top_k: NDArray[np.int32]
    top_p: NDArray[np.float32]
    uniform: NDArray[np.float64]

    def of(self, where: slice | NDArray[Any]) -> RowDraws:
        return RowDraws(
            self.temperature[where], self.top_k[where], self.top_p[where], self.uniform[where]
        )


def keys(uniforms: NDArray[np.float64]) -> NDArray[np.int64]:
    """Keys of each draw's numbers, from its uniform."""
    return mix((uniforms * 2.0**53).astype(np.int64))


def places(vocabulary: int) -> NDArray[np.int64]:
    """The numbers that a draw needs: those of a chunk's ids, (CHUNK,) or fewer, then those of the
    chunks if there are several."""
    ids = np.arange(1, 1 + min(CHUNK, vocabulary))
    count = chunks(vocabulary)
    each = np.append(ids, CHUNK + np.arange(1, 1 + count)) if count > 1 else ids
    return each * signed(GOLDEN)


def chunks(vocabulary: int) -> int:
    """The number of chunks. The last may be short."""
    return -(-vocabulary // CHUNK)


def times(keys: NDArray[np.int64], places: NDArray[np.int64]) -> NDArray[np.float64]:
    """When clocks of rate 1 ring. Both shapes broadcast."""
    return -np.log((numbers(keys, places) + 0.5) * SHARE)


def numbers(keys: Any, places: Any) -> Any:
    """Numbers of 52 bits, from int64 arrays or tensors. ``(number + 0.5) * SHARE`` is a uniform in
    (0, 1)."""
    return (mix(keys + places) >> 12) & (2**52 - 1)


def mix(z: Any) -> Any:
    """SplitMix64's output function, on the unsigned bits of int64."""
    z = (z ^ ((z >> 30) & (2**34 - 1))) * signed(FIRST)
    z = (z ^ ((z >> 27) & (2**37 - 1))) * signed(SECOND)
    return z ^ ((z >> 31) & (2**33 - 1))


def signed(constant: int) -> int:
    """The int64 of the same bits."""
    return constant - 2**64


def draw_token(
    logits: NDArray[np.float32], temperature: float, top_k: int, top_p: float, uniform: float
) -> tuple[int, float]:
    """Sample from the renormalised top-k, then top-p set. Returns the token and its logprob.

    The nucleus (Holtzman et al., 2020) is the smallest set of most likely tokens whose mass reaches
    ``top_p``. Ties go to the lower id. ``temperature`` 0 is greedy, from all tokens. ``logits`` is
    (vocabulary,), and ``uniform`` the token's number in its seed's stream.
    """
    scaled = logits.astype(np.float64) / (temperature or 1.0)
    weights = np.exp(scaled - scaled.max())
    if temperature == 0:
        return int(weights.argmax()), float(-np.log(weights.sum()))
    kept = np.sort(_most_likely(weights, top_k, top_p))
    ring = times(keys(np.array([uniform])), places(len(weights)))
    running, starts = np.unique(kept // CHUNK, return_index=True)
    sums = np.add.reduceat(weights[kept], starts)
    if len(weights) > CHUNK:
        kept = kept[kept // CHUNK == running[np.argmax(sums / ring[CHUNK + running])]]
    token = int(kept[np.argmax(weights[kept] / ring[kept % CHUNK])])
    return token, float(np.log(weights[token] / sums.sum()))


def _most_likely(weights: NDArray[np.float64], top_k: int, top_p: float) -> NDArray[np.int64]:
    size = len(weights)
    kept = np.arange(size)
    if 0 < top_k < size:
        bound = np.partition(weights, size - top_k)[size - top_k]
        kept = np.flatnonzero(weights >= bound)
        kept = kept[np.argsort(-weights[kept], kind="stable")][:top_k]
    if top_p < 1.0:
        total = weights[kept].sum()
        # Tokens below this share add up to less than 1 - top_p: none of them is in the nucleus.
        candidates = kept[weights[kept] >= total * (1.0 - top_p) / len(kept)]
        candidates = candidates[np.argsort(-weights[candidates], kind="stable")]
        mass = np.cumsum(weights[candidates])
        kept = candidates[: int(np.searchsorted(mass, top_p * total, side="left")) + 1]
    return kept
