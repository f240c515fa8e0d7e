"""Whole numbers of prompts for each domain."""

from __future__ import annotations

import math
from collections.abc import Mapping


def split(total: int, weights: Mapping[str, float]) -> dict[str, int]:
    """Split ``total`` in proportion to ``weights`` by largest remainder; the parts sum to it.

    Ties go to the earlier key. Raises ``ValueError`` on a negative, infinite or all-zero weight.
    """
    for name, weight in weights.items():
        if not (math.isfinite(weight) and weight >= 0.0):
            raise ValueError(f"weight of domain {name!r} must be finite and >= 0, got {weight}")
    whole = math.fsum(weights.values())
    if whole <= 0.0:
        raise ValueError("domain weights must have a positive sum: give one domain a weight > 0")
    shares = {name: total * (weight / whole) for name, weight in weights.items()}
    parts = {name: math.floor(share + _ROUNDING) for name, share in shares.items()}
    left = total - sum(parts.values())
    # Remainders are rounded so that equal weights tie whatever the last bit says.
    order = sorted(shares, key=lambda name: -round(shares[name] - parts[name], 9))
    for name in order[:left]:
        parts[name] += 1
    return parts


_ROUNDING = 1e-9
