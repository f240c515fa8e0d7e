"""What becomes of a run that goes on with another value of a key."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rollpacker.config.base import OnResume, Resumed, keys
from rollpacker.config.tree import RunConfig

_WHOLE = "eval.data"
"""A section whose keys are of its own class: it chooses problems to measure by."""

_CLASSES: Mapping[str, OnResume] = {
    re.sub(r"\[\w+\]", "", key.path): mark.kind
    for key in keys(RunConfig)
    for mark in key.field.metadata
    if isinstance(mark, Resumed)
}
"""By dotted key. A section's own entry is for where it comes or goes as a whole."""


def plain_key(key: str) -> str:
    """``rewards[].timeout_s`` of ``rewards.0.timeout_s``."""
    return re.sub(r"\.\d+(?=\.)", "[]", key)


def on_resume(key: str) -> OnResume:
    """The class of a key; what is not known is refused."""
    key = _WHOLE if key.startswith(f"{_WHOLE}.") else plain_key(key)
    return _CLASSES.get(key, "refused")


def of_change(key: str, before: Any, now: Any, *, scheduled: bool) -> OnResume:
    """The class of one change, as some keys have other classes for some values.

    ``scheduled``: the learning rate depends on when the run is to end.
    """
    if key in ("steps", "epochs") and not scheduled:
        return "free"
    if key == "engine.kind" and "fake" in (before, now):  # it samples no model
        return "refused"
    return on_resume(key)
