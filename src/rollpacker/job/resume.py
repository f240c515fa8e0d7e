"""Whether a run starts anew or goes on from a checkpoint."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollpacker.config import Config, RunConfig, parse
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

_THEN = {
    "rollout.min_reward_range": 1e-3,
    "train.kl_bias_correction": False,
    "train.algorithm.whiten": "responses",
}
"""What version 0.1.0 did, where it had no such key and today's default is another."""


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


def as_begun(config: RunConfig, found: Found | None) -> RunConfig:
    """The configuration with which a run goes on: where a default has changed since it began, and
    nobody asks for another value, that of then."""
    if found is None:
        return config
    tree = config.model_dump(mode="json")
    began = _of_then(found.state["config"])
    for key in _THEN:
        node, leaf = _place(tree, key)
        if leaf in node and not _given(config, key):
            old, _ = _place(began, key)
            node[leaf] = old.get(leaf, node[leaf])
    return RunConfig.model_validate(tree)


def _of_then(old: Mapping[str, Any]) -> dict[str, Any]:
    """A checkpoint's configuration with every key, where it lacks some with what was done then."""
    tree = copy.deepcopy(dict(old))
    for key, value in _THEN.items():
        node, leaf = _place(tree, key)
        if leaf != "whiten" or node.get("kind") == "reinforce_pp":
            node.setdefault(leaf, value)
    return parse(tree, source="the checkpoint's config").model_dump(mode="json")


def _place(tree: dict[str, Any], key: str) -> tuple[dict[str, Any], str]:
    *parents, leaf = key.split(".")
    for parent in parents:
        tree = tree[parent]
    return tree, leaf


def _given(config: Config, key: str) -> bool:
    """Whether a file or an override names this key."""
    name, _, rest = key.partition(".")
    if name not in config.model_fields_set:
        return False
    return not rest or _given(getattr(config, name), rest)


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
    _check(found.path, _of_then(found.state["config"]), config.model_dump(mode="json"))
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
