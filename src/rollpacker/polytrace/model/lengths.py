"""Models of response lengths: a body with a tail, and a copula with any marginal."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rollpacker.polytrace.numerics import least_squares, normal_cdf
from rollpacker.polytrace.statistics import QuantileTable

Floats = NDArray[np.float64]


class Lengths(Protocol):
    """A hierarchical model of response lengths: traits of a prompt, then its responses."""

    def traits(self, rng: np.random.Generator, prompts: int) -> Floats:
        """Draw the shared traits of each prompt's responses, shape (prompts, k). Column 0 is
        standard normal and rises with length. Keep a prompt's row to sample more responses of
        the same prompt (another attempt, another epoch)."""
        ...

    def given(self, rng: np.random.Generator, traits: Floats, responses: int) -> NDArray[np.int32]:
        """Draw lengths in tokens of fresh responses, shape (prompts, responses)."""
        ...

    def sample(self, rng: np.random.Generator, prompts: int, responses: int) -> NDArray[np.int32]:
        return self.given(rng, self.traits(rng, prompts), responses)


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthModel(Lengths):
    """A log-normal body with a part that a prompt's responses share, and a log-uniform tail.

    The body is ``exp(N(ln median, between) + N(0, within))``. A prompt's responses share its first
    normal. With probability ``q ~ Beta(q c, (1 - q) c)``, drawn per prompt, a response is
    log-uniform over ``tail_low`` to ``tail_high`` instead. Lengths are rounded and clipped to
    1..``cap``.

    Args:
        tail_share: mean of ``q``, 0 for no tail.
        tail_concentration: ``c``. The smaller it is, the fewer prompts hold the tail.
        tail_high: longest response of the tail, tokens. It may exceed the cap.
    """

    median: float
    between: float
    within: float
    tail_share: float = 0.0
    tail_concentration: float = 1.0
    tail_low: float = 1.0
    tail_high: float = 1.0
    cap: int
    kind: Literal["mixture"] = "mixture"

    def __post_init__(self) -> None:
        if min(self.median, self.tail_low, self.tail_concentration) <= 0.0 or self.cap < 1:
            raise ValueError("lengths: median, tail_low, tail_concentration and cap must be > 0")
        if min(self.between, self.within) < 0.0 or self.tail_high < self.tail_low:
            raise ValueError("lengths: between and within must be >= 0 and tail_high >= tail_low")
        if not 0.0 <= self.tail_share < 1.0:
            raise ValueError(f"lengths: tail_share must be in [0, 1), got {self.tail_share}")

    def traits(self, rng: np.random.Generator, prompts: int) -> Floats:
        level = rng.standard_normal(prompts)
        if self.tail_share == 0.0:
            return np.column_stack([level, np.zeros(prompts)])
        a = self.tail_share * self.tail_concentration
        share = rng.beta(a, self.tail_concentration - a, prompts)
        return np.column_stack([level, share])

    def given(self, rng: np.random.Generator, traits: Floats, responses: int) -> NDArray[np.int32]:
        shape = (traits.shape[0], responses)
        noise = self.within * rng.standard_normal(shape)
        log = np.log(self.median) + self.between * traits[:, :1] + noise
        if self.tail_share > 0.0:
            tail = rng.uniform(np.log(self.tail_low), np.log(self.tail_high), shape)
            log = np.where(rng.random(shape) < traits[:, 1:2], tail, log)
        tokens = np.rint(np.exp(np.minimum(log, np.log(self.cap))))
        return np.clip(tokens, 1, self.cap).astype(np.int32)


# --- Any marginal, with a latent normal that a prompt's responses share

_SHARED = np.arange(-5.5, 5.51, 0.05)
_OWN = np.arange(-5.5, 5.51, 0.025)


def _weights(grid: Floats) -> Floats:
    density = np.exp(-0.5 * grid**2)
    return density / density.sum()


@dataclass(frozen=True, slots=True, kw_only=True)
class CopulaLengths(Lengths):
    """Lengths whose marginal is a quantile table, for any correlation within a prompt.

    A response's latent is ``sqrt(rho) a + sqrt(1 - rho) exp(skew tanh a) e`` with the prompt's
    normal ``a`` and its own ``e``. Its length is the quantile at the latent's exact level. With
    ``skew`` above 0, long prompts vary more.
    """

    marginal: QuantileTable
    rho: float
    skew: float = 0.0
    cap: int | None = None
    kind: Literal["copula"] = "copula"

    def __post_init__(self) -> None:
        if not 0.0 <= self.rho < 1.0:
            raise ValueError(f"lengths: rho must be in [0, 1), got {self.rho}")

    def traits(self, rng: np.random.Generator, prompts: int) -> Floats:
        return rng.standard_normal((prompts, 1))

    def given(self, rng: np.random.Generator, traits: Floats, responses: int) -> NDArray[np.int32]:
        own = rng.standard_normal((traits.shape[0], responses))
        tokens = np.rint(self.marginal.at(_levels(self.rho, self.skew, traits[:, :1], own)))
        longest = self.cap if self.cap is not None else np.iinfo(np.int32).max
        return np.clip(tokens, 1, longest).astype(np.int32)

    def intraclass(self) -> tuple[float, float]:
        """Return the ICC of length and of log length in the limit of many prompts, by
        quadrature."""
        lengths = self.marginal.at(_levels(self.rho, self.skew, _SHARED[:, None], _OWN))
        return _share_between(lengths), _share_between(np.log(lengths))

    @classmethod
    def matching(
        cls, lengths: ArrayLike, icc: float, icc_log: float, cap: int | None = None
    ) -> CopulaLengths:
        """Fit the marginal to ``lengths``, and ``rho`` and ``skew`` to both ICCs. If no pair
        gives both (far apart on a light tail), the result is nearest in least squares."""
        seen = np.asarray(lengths, np.float64)
        edge = None if cap is None else 1.0 - float(np.mean(seen >= cap))
        marginal = QuantileTable.of(np.maximum(seen, 1.0), edge)
        if max(icc, icc_log) <= 0.0 or marginal.values[0] == marginal.values[-1]:
            return cls(marginal=marginal, rho=0.0, cap=cap)
        target = np.clip([icc, icc_log], 0.0, 0.999)

        def miss(free: Floats) -> Floats:
            rho = float(normal_cdf(free[0]))
            got = cls(marginal=marginal, rho=min(rho, 0.999), skew=float(free[1])).intraclass()
            return np.append(np.asarray(got) - target, 1e-4 * free[1])

        start = [0.0, 0.0] if icc_log > 0.2 else [-1.5, 0.0]
        best = least_squares(miss, start, [-4.0, -1.5], [3.0, 1.5])
        rho = min(float(normal_cdf(best[0])), 0.999)
        return cls(marginal=marginal, rho=round(rho, 6), skew=round(float(best[1]), 6), cap=cap)


def _spread(rho: float, skew: float, shared: Floats) -> Floats:
    return float(np.sqrt(1.0 - rho)) * np.exp(skew * np.tanh(shared))


@lru_cache(maxsize=64)
def _latent_cdf(rho: float, skew: float) -> tuple[Floats, Floats]:
    spread = _spread(rho, skew, _SHARED)
    reach = 6.0 * np.sqrt(rho) + 6.0 * float(spread.max())
    grid: Floats = reach * np.arange(-1.0, 1.0005, 1.0 / 600.0)
    scores = (grid[:, None] - np.sqrt(rho) * _SHARED) / spread
    return grid, normal_cdf(scores) @ _weights(_SHARED)


def _levels(rho: float, skew: float, shared: Floats, own: Floats) -> Floats:
    latent = float(np.sqrt(rho)) * shared + _spread(rho, skew, shared) * own
    grid, cdf = _latent_cdf(rho, skew)
    return np.asarray(np.interp(latent, grid, cdf), np.float64)


def _share_between(values: Floats) -> float:
    outer, inner = _weights(_SHARED), _weights(_OWN)
    means = values @ inner
    centre = outer @ means
    total = outer @ ((values - centre) ** 2 @ inner)
    return float(outer @ (means - centre) ** 2 / total) if total > 0.0 else 0.0
