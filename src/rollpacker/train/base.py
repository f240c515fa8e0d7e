"""A training replica's report: un-normalised sums, divided once at the end of the step."""

from __future__ import annotations

from dataclasses import dataclass, field

from rollpacker.core.types import PromptId

TRAINED = ("entropy", "ratio", "abs_logprob_difference")
"""Metrics of the tokens that have a gradient, as no others are run."""
RATIO = "sampler/ratio"
"""The trainer's probability of a sampled token over the sampler's. Its mean, ``_min`` and ``_max``
are metrics."""


SampleId = tuple[PromptId, int]  # a sample's prompt and its index in the group


@dataclass(frozen=True, kw_only=True)
class Partial:
    """Un-normalised sums over some groups. Those of any split of a batch add up to its own.

    Args:
        normaliser: the loss's share of the divisor (tokens, sequences, ...).
        tokens: sampled tokens of the loss.
        samples: responses.
        sums: numerators of the metrics by name (``train/losses.py``).
        ranges: the smallest and the largest measured value, by name.
    """

    normaliser: float
    tokens: int
    samples: int = 0
    sums: dict[str, float]
    ranges: dict[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])

    def __add__(self, other: Partial) -> Partial:
        names = self.sums.keys() | other.sums.keys()
        return Partial(
            normaliser=self.normaliser + other.normaliser,
            tokens=self.tokens + other.tokens,
            samples=self.samples + other.samples,
            sums={n: self.sums.get(n, 0.0) + other.sums.get(n, 0.0) for n in sorted(names)},
            ranges={n: self._range(n, other) for n in sorted({*self.ranges, *other.ranges})},
        )

    def _range(self, name: str, other: Partial) -> tuple[float, float]:
        found = [each.ranges[name] for each in (self, other) if name in each.ranges]
        return min(low for low, _ in found), max(high for _, high in found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """The result of one update.

    Args:
        applied: False if the loss or gradient was not finite and the update was skipped.
        grad_norm: before clipping.
        skipped: updates skipped in a row, this one included.
        metrics: means by TRL's names (``loss``, ``kl``, ``clip_ratio/region_mean`` ...).
            ``trained_tokens/*`` and ``sampler/*`` are over the tokens that have a gradient.
    """

    applied: bool
    grad_norm: float
    learning_rate: float
    metrics: dict[str, float]
    skipped: int = 0
