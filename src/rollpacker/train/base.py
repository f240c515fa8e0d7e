"""The trainer protocol: gradients accumulate un-normalised, one division ends the step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from rollpacker.core.types import Group, PromptId

if TYPE_CHECKING:
    import torch


TRAINED = ("entropy", "ratio", "abs_logprob_difference")
"""What is known of tokens that have a gradient only: others are not run."""


class NotFiniteError(RuntimeError):
    """Updates come to nothing, one after the other; the message says what to change."""


SampleId = tuple[PromptId, int]
"""A sample of a step: its prompt and its index in the group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Partial:
    """Un-normalised sums over some groups; those of any split of a batch add up to its own.

    Args:
        normaliser: what the loss is divided by in the end (tokens, sequences, ...).
        tokens: response tokens of the loss.
        samples: responses.
        sums: numerators of the metrics by name (``loss``, ``clip_low``, ``clip_high``, ``kl`` and
            those of ``TRAINED``).
    """

    normaliser: float
    tokens: int
    samples: int = 0
    sums: dict[str, float]

    def __add__(self, other: Partial) -> Partial:
        """Sum of two partials."""
        names = self.sums.keys() | other.sums.keys()
        return Partial(
            normaliser=self.normaliser + other.normaliser,
            tokens=self.tokens + other.tokens,
            samples=self.samples + other.samples,
            sums={n: self.sums.get(n, 0.0) + other.sums.get(n, 0.0) for n in sorted(names)},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """What one update did.

    Args:
        applied: false when loss or gradient was not finite and the update was skipped.
        grad_norm: before clipping.
        learning_rate: of this update.
        metrics: means by TRL's names (``loss``, ``kl``, ``clip_ratio/region_mean`` ...), and
            ``trained_tokens/*``: over the tokens that have a gradient.
    """

    applied: bool
    grad_norm: float
    learning_rate: float
    metrics: dict[str, float]


class Trainer(Protocol):
    """A training replica. Replicas that apply the same sums hold the same weights."""

    def accumulate(self, groups: Sequence[Group]) -> Partial:
        """Add the groups' un-normalised gradients to this replica's sum."""
        ...

    def apply(self, total: Partial) -> Update:
        """Reduce the sums over all replicas, divide by ``total.normaliser`` and update.

        Collective: every replica calls it with the same ``total``. Clears the sums.
        """
        ...

    def score(self, groups: Sequence[Group]) -> dict[SampleId, NDArray[np.float32]]:
        """Log-probabilities of the responses that have a gradient, under the weights in place.

        By prompt and sample index, shape (T,), nats, of the whole softmax.
        """
        ...

    def discard(self) -> None:
        """Throw the accumulated gradients away (a step that is repeated)."""
        ...

    def weights(self) -> Iterable[tuple[str, torch.Tensor]]:
        """The weights by the checkpoint's names."""
        ...

    def checksum(self) -> int:
        """CRC-32 of all weights; replicas must agree."""
        ...

    def save(self, folder: Path) -> None:
        """Write the model in the hub's layout, and ``optimizer/``, into ``folder``."""
        ...

    def load(self, folder: Path) -> None:
        """Restore what ``save`` wrote. Raises ``ValueError`` on another architecture."""
        ...
