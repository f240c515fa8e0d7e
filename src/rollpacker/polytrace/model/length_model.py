"""Response lengths by the body and tail mixture, as in the paper's three settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class Lengths(Protocol):
    """A hierarchical model of response lengths: traits of a prompt, then its responses."""

    def traits(self, rng: np.random.Generator, prompts: int) -> Floats:
        """What the responses of a prompt share, shape (prompts, k).

        Column 0 is standard normal and rises with length. Keep a prompt's row to sample more
        responses of the same prompt (another attempt, another epoch).
        """
        ...

    def given(self, rng: np.random.Generator, traits: Floats, responses: int) -> NDArray[np.int32]:
        """Lengths in tokens of fresh responses, shape (prompts, responses)."""
        ...

    def sample(self, rng: np.random.Generator, prompts: int, responses: int) -> NDArray[np.int32]:
        """Lengths in tokens of fresh prompts, shape (prompts, responses)."""
        return self.given(rng, self.traits(rng, prompts), responses)


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthModel(Lengths):
    """A log-normal body with a prompt's shared part, and a log-uniform tail.

    The body is ``exp(N(ln median, between) + N(0, within))``, its first normal shared by a
    prompt's responses; with probability ``q ~ Beta(q c, (1 - q) c)``, drawn per prompt, a response
    is log-uniform over ``tail_low`` to ``tail_high`` instead. Rounded, clipped to 1..``cap``.

    Args:
        median: of the body, tokens.
        between: standard deviation of log length between prompts.
        within: standard deviation of log length within a prompt.
        tail_share: mean of ``q``, 0 for no tail.
        tail_concentration: ``c``; the smaller, the more a tail belongs to few prompts.
        tail_low: shortest response of the tail, tokens.
        tail_high: longest, tokens; may lie beyond the cap.
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
        """Columns: the shared normal, and ``q``."""
        level = rng.standard_normal(prompts)
        if self.tail_share == 0.0:
            return np.column_stack([level, np.zeros(prompts)])
        a = self.tail_share * self.tail_concentration
        share = rng.beta(a, self.tail_concentration - a, prompts)
        return np.column_stack([level, share])

    def given(self, rng: np.random.Generator, traits: Floats, responses: int) -> NDArray[np.int32]:
        """Lengths of fresh responses, shape (prompts, responses)."""
        shape = (traits.shape[0], responses)
        noise = self.within * rng.standard_normal(shape)
        log = np.log(self.median) + self.between * traits[:, :1] + noise
        if self.tail_share > 0.0:
            tail = rng.uniform(np.log(self.tail_low), np.log(self.tail_high), shape)
            log = np.where(rng.random(shape) < traits[:, 1:2], tail, log)
        tokens = np.rint(np.exp(np.minimum(log, np.log(self.cap))))
        return np.clip(tokens, 1, self.cap).astype(np.int32)
