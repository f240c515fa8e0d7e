"""JSON has no nan and no infinity."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast


def finite(value: Any) -> Any:
    """The same tree of plain values, with None for every number that is not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in cast(Mapping[Any, Any], value).items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in cast(list[Any], value)]
    return value
