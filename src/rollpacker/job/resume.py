"""Whether a run starts anew or goes on from a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rollpacker.config import Config, RunConfig
from rollpacker.core.journal import segments
from rollpacker.core.upgrade import config_of_now
from rollpacker.runtime.checkpoint import Found

_MAY_CHANGE = (
    "output",
    "steps",
    "epochs",
    "devices",
    "cluster",
    "engine",
    "trainer",
    "checkpoint",
    "samples",
    "trackers",
    "eval",
    "mux",
)
"""What may differ when a run is continued."""

_SAID = ("train.learning_rate", "train.lr_scheduler_type", "train.warmup_steps")
"""What may differ too, and changes what is learned: it is said. The optimizer goes on."""

_THEN: Mapping[str, Any] = {
    "rollout.min_reward_range": 1e-3,
    "train.kl_bias_correction": False,
    "train.algorithm.whiten": "responses",
}
"""By dotted key, what a run did before the key was there, where today's default is another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Where a run begins.

    Args:
        path: the checkpoint's folder; None for a new run.
        state: what the checkpoint holds besides tensors.
        changed: a line for each setting that is not what it was.
    """

    path: Path | None = None
    state: dict[str, Any] | None = None
    changed: tuple[str, ...] = ()

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
    began = of_then(found.state["config"])
    for key in _THEN:
        node, leaf = _place(tree, key)
        if leaf in node and not _given(config, key):
            old, _ = _place(began, key)
            node[leaf] = old.get(leaf, node[leaf])
    return RunConfig.model_validate(tree)


def of_then(old: Mapping[str, Any]) -> Mapping[str, Any]:
    """A checkpoint's configuration with every key: those that came later as the run behaved."""
    whitens = old["train"]["algorithm"]["kind"] == "reinforce_pp"
    then = {k: v for k, v in _THEN.items() if whitens or k != "train.algorithm.whiten"}
    return as_of_now(old, then)


def _place(tree: Any, key: str) -> tuple[dict[str, Any], str]:
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
        if found is None and any(p.exists() for p in segments(folder / "journal.jsonl")):
            raise ValueError(
                f"{folder} holds a run that has no checkpoint: start it anew there with "
                "--resume auto, or choose another folder with --out"
            )
        if found is not None:
            raise ValueError(
                f"{folder} holds a run already: continue it with --resume auto, "
                "or choose another folder with --out"
            )
        return Start()
    if found is None:
        return Start()
    if config.devices.emulate is not None:
        raise ValueError(
            f"devices.emulate cannot go on from the checkpoint in {folder}: choose another folder "
            "with --out"
        )
    before = of_then(found.state["config"])
    changed = _changes(found.path, before, config.model_dump(mode="json"))
    return Start(path=found.path, state=found.state, changed=changed)


def as_of_now(old: Mapping[str, Any], then: Mapping[str, Any]) -> Mapping[str, Any]:
    """A checkpoint's configuration with the keys that came later.

    They have the values of ``then``, by dotted key (``*`` for every item of a list), else today's
    defaults. One that today's configuration does not take is returned as it is.
    """
    filled = config_of_now(old)
    for key, value in then.items():
        filled = _filled(filled, key.split("."), value)
    try:
        return RunConfig.model_validate(filled).model_dump(mode="json")
    except ValidationError:
        return filled


def _filled(node: Any, path: list[str], value: Any) -> Any:
    name, *rest = path
    if name == "*":
        return [_filled(item, rest, value) for item in node] if isinstance(node, list) else node
    if not isinstance(node, dict):
        return node
    if rest:
        return node | {name: _filled(node[name], rest, value)} if name in node else node
    return {name: value} | node


def _changes(path: Path, old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[str, ...]:
    """What may change and did, in words. Raises ``ValueError`` on what may not."""
    said: list[str] = []
    for key in new:
        for where, before, now in _differences(key, old.get(key), new[key]):
            if key in _MAY_CHANGE:
                continue
            if where not in _SAID:
                raise ValueError(
                    f"{path} was made with another config: '{where}' was {before!r}, now {now!r}; "
                    "change it back or choose another folder with --out"
                )
            said.append(f"{where} was {before!r} and is {now!r} from here on")
    return tuple(said)


def _differences(key: str, old: Any, new: Any) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(old, dict) and isinstance(new, dict):
        for name in {**old, **new}:
            yield from _differences(f"{key}.{name}", old.get(name), new.get(name))
    elif old != new:
        yield key, old, new
