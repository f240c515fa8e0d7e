"""Response lengths drawn from a trace itself, prompt by prompt."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rollpacker.polytrace.model.length_model import Floats, Lengths


class Redrawn(Lengths):
    """Prompts and their responses, both with replacement; a ``Lengths`` without parameters.

    Column 0 of the traits numbers the visit: it is no normal score.

    Args:
        tokens: lengths, shape (n,).
        groups: visit of each, from 0, none empty, shape (n,).
    """

    def __init__(self, tokens: Floats, groups: NDArray[np.int64]) -> None:
        self._tokens = tokens[np.argsort(groups, kind="stable")]
        self._sizes = np.bincount(groups)
        self._starts = np.cumsum(self._sizes) - self._sizes

    def traits(self, rng: np.random.Generator, prompts: int) -> Floats:
        """Numbers of visits, shape (prompts, 1)."""
        return rng.integers(self._sizes.size, size=(prompts, 1)).astype(np.float64)

    def given(self, rng: np.random.Generator, traits: Floats, responses: int) -> NDArray[np.int32]:
        """Lengths of the visits' responses, shape (prompts, responses)."""
        visit = traits[:, :1].astype(np.int64)
        shape = (traits.shape[0], responses)
        place = np.floor(rng.random(shape) * self._sizes[visit]).astype(np.int64)
        return self._tokens[self._starts[visit] + place].astype(np.int32)
