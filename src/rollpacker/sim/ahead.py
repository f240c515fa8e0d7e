"""What decoding ahead brings a simulated engine: tokens of a step, and what its drafts cost."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from pydantic import Field

from rollpacker.config import Config
from rollpacker.policy.speculation import MOST, worth


class Ahead(Config):
    """Engines that decode ahead.

    The costs are the middle of what was published for GPUs; a drafter that is a network of its own
    takes more.
    """

    tokens: float = Field(default=1.0, ge=1.0, le=MOST)
    """Tokens that a step gives a sequence where it verifies a draft of 16; 1: engines do not decode
    ahead. Runs report it as ``speculation/last_tokens_per_verification``."""
    step_s: float = Field(default=0.5e-3, ge=0.0)
    """More seconds of a step with drafts, on GPUs."""
    row_s: float = Field(default=15e-6, ge=0.0)
    """More seconds for each drafted token, on GPUs; on a measured CPU it is a row of its curve."""
    rows: int = Field(default=128, ge=2)
    """Most rows of a step with drafts."""

    @cached_property
    def acceptance(self) -> float:
        """How often a drafted token is right, if each one is as often: what gives ``tokens``."""
        low, high = 0.0, 1.0
        for _ in range(50):
            middle = (low + high) / 2
            low, high = (middle, high) if _tokens(middle, MOST) < self.tokens else (low, middle)
        return low


def _tokens(acceptance: float, drafted: int) -> float:
    """Tokens of a verification: the draft's as long as they are right, and one more."""
    return sum(acceptance**n for n in range(drafted + 1))


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
        acceptance, drafted = self.ahead.acceptance, 0
        spare, least = worth(batch, self.free, self.row_cost)
        if batch <= self.below and acceptance > 0.0:
            most = min(self.most, self.ahead.rows // batch - 1)
            while drafted < most and (drafted < spare or acceptance ** (drafted + 1) >= least):
                drafted += 1
        return Pace(_tokens(acceptance, drafted), drafted) if drafted else PLAIN
