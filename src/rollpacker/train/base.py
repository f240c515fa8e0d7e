"""What a training replica reports: un-normalised sums, divided once at the end of the step."""

from __future__ import annotations

from dataclasses import dataclass, field

from rollpacker.core.types import PromptId

TRAINED = ("entropy", "ratio", "abs_logprob_difference")
"""What is known of tokens that have a gradient only: others are not run."""
RATIO = "sampler/ratio"
"""The trainer's probability of a sampled token over the sampler's: its mean, ``_min`` and ``_max``
are metrics."""


SampleId = tuple[PromptId, int]
"""A sample of a step: its prompt and its index in the group."""


@dataclass(frozen=True, kw_only=True)
class Partial:
    """Un-normalised sums over some groups; those of any split of a batch add up to its own.

    Args:
        normaliser: what the loss is divided by in the end (tokens, sequences, ...).
        tokens: sampled tokens of the loss.
        samples: responses.
        sums: numerators of the metrics by name (``train/losses.py`` has them all).
        ranges: the smallest and the largest value, by name; of what was measured.
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
    """What one update did.

    Args:
        applied: false when loss or gradient was not finite and the update was skipped.
        grad_norm: before clipping.
        learning_rate: of this update.
        skipped: updates in a row that were skipped, this one among them.
        metrics: means by TRL's names (``loss``, ``kl``, ``clip_ratio/region_mean`` ...), and
            ``trained_tokens/*`` and ``sampler/*``: over the tokens that have a gradient.
    """

    applied: bool
    grad_norm: float
    learning_rate: float
    metrics: dict[str, float]
    skipped: int = 0
