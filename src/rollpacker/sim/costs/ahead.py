"""What decoding ahead brings a simulated engine: tokens of a step, and what its drafts cost."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from pydantic import Field, model_validator

from rollpacker.config import Config
from rollpacker.policy.engines.hardware import LatencyCurve
from rollpacker.policy.engines.speculation import MOST, drafted, tokens, worth


class Ahead(Config):
    """Engines that decode ahead. The costs are the middle of what was published for GPUs."""

    tokens: float = Field(default=1.0, ge=1.0)
    """Tokens of a step that verifies a draft; 1: none do. In runs it is
    ``speculation/last_tokens_per_verification``."""
    drafted: int = Field(default=MOST, ge=1)
    """Most tokens of such a draft."""
    step_s: float = Field(default=0.5e-3, ge=0.0)
    """More seconds of a step with drafts, on GPUs."""
    row_s: float = Field(default=15e-6, ge=0.0)
    """More seconds for each drafted token, on GPUs; on a CPU it is a row of ``latency``."""
    rows: int = Field(default=128, ge=2)
    """Most rows of a step with drafts."""
    measured: dict[int, float] = Field(default_factory=dict[int, float])
    """Seconds of a token by number of sequences that decode ahead, instead of the costs above."""

    @model_validator(mode="after")
    def _reachable(self) -> Ahead:
        if self.tokens > self.drafted + 1:
            raise ValueError(
                f"tokens={self.tokens:g} of a draft of drafted={self.drafted}: at most one more"
            )
        if self.measured:
            LatencyCurve(self.measured)
        return self

    @property
    def possible(self) -> bool:
        """Whether engines decode ahead."""
        return self.tokens > 1.0 or bool(self.measured)

    @cached_property
    def acceptance(self) -> float:
        """How often a drafted token is right, if each one is as often: what gives ``tokens``."""
        low, high = 0.0, 1.0
        for _ in range(50):
            middle = (low + high) / 2
            few = tokens(middle, self.drafted) < self.tokens
            low, high = (middle, high) if few else (low, middle)
        return low


class Pace(NamedTuple):
    """A step's: tokens that each sequence gets, and those that are drafted for it."""

    tokens: float = 1.0
    drafted: int = 0


PLAIN = Pace()


@dataclass(frozen=True, slots=True)
class Rule:
    """What the policy told an engine (``decisions.Speculate``), and what its drafts are like."""

    below: int
    most: int
    free: int
    row_cost: float
    ahead: Ahead

    def pace(self, batch: int) -> Pace:
        """With so many sequences: drafts end where they are reached too seldom."""
        if batch > self.below:
            return PLAIN
        acceptance = self.ahead.acceptance
        most = min(self.most, self.ahead.drafted, self.ahead.rows // batch - 1)
        count = drafted(acceptance, worth(batch, self.free, self.row_cost), most)
        return Pace(tokens(acceptance, count), count) if count else PLAIN
