"""The effect of each key's changed value on a resumed run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rollpacker.config.base import OnResume, Resumed, keys
from rollpacker.config.tree import RunConfig

_WHOLE = "eval.data"
"""All keys below have the class of this section, which chooses the evaluation's problems."""

_CLASSES: Mapping[str, OnResume] = {
    re.sub(r"\[\w+\]", "", key.path): mark.kind
    for key in keys(RunConfig)
    for mark in key.field.metadata
    if isinstance(mark, Resumed)
}
"""By dotted key. A section's own entry applies if the whole section is added or removed."""


def plain_key(key: str) -> str:
    """Turn ``rewards.0.timeout_s`` into ``rewards[].timeout_s``."""
    return re.sub(r"\.\d+(?=\.)", "[]", key)


def on_resume(key: str) -> OnResume:
    """Return the class of a key. Unknown keys are refused."""
    key = _WHOLE if key.startswith(f"{_WHOLE}.") else plain_key(key)
    return _CLASSES.get(key, "refused")


def of_change(key: str, before: Any, now: Any, *, scheduled: bool) -> OnResume:
    """Return the class of one change, which for some keys depends on the values. ``scheduled``:
    the learning rate depends on the number of steps."""
    if key in ("steps", "epochs") and not scheduled:
        return "free"
    if key == "engine.kind" and "fake" in (before, now):  # it samples no model
        return "refused"
    return on_resume(key)
