"""A distribution as a short table of its quantiles."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

_LEVELS = np.concatenate(
    [
        [0.0, 0.005, 0.01, 0.02, 0.03],
        np.arange(0.05, 0.9, 0.05),
        [0.9, 0.925, 0.95, 0.96, 0.97, 0.98, 0.985, 0.99, 0.9925, 0.995, 0.9975],
        [0.999, 0.9995, 0.9998, 0.9999, 1.0],
    ]
)
_SMALLEST = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantileTable:
    """Quantiles, interpolated on a log scale between levels.

    Args:
        levels: increasing from 0 to 1, at least two.
        values: quantiles at the levels, positive, not decreasing.
    """

    levels: tuple[float, ...]
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        levels, values = np.asarray(self.levels), np.asarray(self.values)
        if levels.size < 2 or levels.size != values.size:
            raise ValueError("quantile table: levels and values must have one length, at least 2")
        if levels[0] != 0.0 or levels[-1] != 1.0 or (np.diff(levels) <= 0.0).any():
            raise ValueError("quantile table: levels must increase from 0 to 1")
        if values[0] <= 0.0 or (np.diff(values) < 0.0).any():
            raise ValueError("quantile table: values must be positive and must not decrease")

    @classmethod
    def of(cls, values: ArrayLike, edge: float | None = None) -> QuantileTable:
        """The table of a sample; ``edge``: one more level to keep (where an atom begins)."""
        seen = np.maximum(np.asarray(values, np.float64), _SMALLEST)
        if seen.size == 0:
            raise ValueError("quantile table: no values")
        known = (seen.size * (1.0 - _LEVELS) >= 1.0) | (_LEVELS == 1.0) | (_LEVELS == 0.0)
        levels = _LEVELS[known]
        if edge is not None and 0.0 < edge < 1.0:
            levels = np.unique(np.append(levels[np.abs(levels - edge) > 1e-6], edge))
        quantiles = np.maximum.accumulate(np.quantile(seen, levels))
        return cls(
            levels=tuple(float(level) for level in levels.round(6)),
            values=tuple(float(f"{value:.6g}") for value in quantiles),
        )

    def at(self, levels: ArrayLike) -> Floats:
        """Quantiles at these levels, any shape."""
        log = np.interp(np.asarray(levels), self.levels, np.log(self.values))
        return np.exp(log)

    def sample(self, rng: np.random.Generator, shape: int | tuple[int, ...]) -> Floats:
        """Independent draws."""
        return self.at(rng.random(shape))
