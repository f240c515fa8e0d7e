"""Whether a run starts anew or goes on from a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollpacker.config import RunConfig, parse
from rollpacker.runtime.checkpoint import Found

_MAY_CHANGE = (
    "output",
    "steps",
    "epochs",
    "workers",
    "checkpoint",
    "samples",
    "trackers",
    "eval",
    "mux",
)
"""What may differ when a run is continued."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Where a run begins.

    Args:
        path: the checkpoint's folder; None for a new run.
        state: what the checkpoint holds besides tensors.
    """

    path: Path | None = None
    state: dict[str, Any] | None = None

    @property
    def step(self) -> int:
        """The first step to run."""
        return 0 if self.state is None else int(self.state["counters"]["step"])


def choose_start(config: RunConfig, folder: Path, found: Found | None, resume: bool) -> Start:
    """Begin anew or go on.

    Raises ``ValueError`` when the folder holds a run that nobody asked to continue, or one of
    another configuration.
    """
    if not resume:
        if found is not None or (folder / "journal.jsonl").exists():
            raise ValueError(
                f"{folder} holds a run already: continue it with --resume auto, "
                "or choose another folder with --out"
            )
        return Start()
    if found is None:
        return Start()
    # What an older version did not write down is what it did: the default.
    old = parse(found.state["config"], str(found.path)).model_dump(mode="json")
    _check(found.path, old, config.model_dump(mode="json"))
    return Start(path=found.path, state=found.state)


def _check(path: Path, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    for key in new:
        if key not in _MAY_CHANGE and old.get(key) != new[key]:
            where, before, now = _difference(key, old.get(key), new[key])
            raise ValueError(
                f"{path} was made with another config: '{where}' was {before!r}, now {now!r}; "
                "change it back or choose another folder with --out"
            )


def _difference(key: str, old: Any, new: Any) -> tuple[str, Any, Any]:
    if isinstance(old, dict) and isinstance(new, dict):
        for name in {**old, **new}:
            if old.get(name) != new.get(name):
                return _difference(f"{key}.{name}", old.get(name), new.get(name))
    return key, old, new
