"""Whether a run starts anew or goes on from a checkpoint."""

from __future__ import annotations

import glob
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError

from rollpacker.config import Config, RunConfig
from rollpacker.config.on_resume import on_resume, plain_key
from rollpacker.core.journal import segments
from rollpacker.core.upgrade import config_of_now
from rollpacker.runtime.checkpoint import Found

_PATHS = ("model.path", "data.path", "data.exclude", "rewards[].function", "environment.path")
"""Keys that may name a file or folder: another spelling of it is no change."""

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
    changed = _changes(found, before, config.model_dump(mode="json"))
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


def _changes(found: Found, old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[str, ...]:
    """What may change and did, in words. Raises ``ValueError`` on what may not."""
    said: list[str] = []
    last_bits: list[str] = []
    for where, before, now in _differences("", {key: old.get(key) for key in new}, new):
        kind = on_resume(where)
        change = f"{where} was {before!r} and is {now!r}"
        if kind == "refused" and not _same_place(where, before, now, found):
            raise ValueError(
                f"{found.path} was made with another config: '{where}' was {before!r}, now "
                f"{now!r}; change it back or choose another folder with --out"
            )
        if kind == "said":
            said.append(f"{change} from here on")
        elif kind == "last bits":
            last_bits.append(change)
    if last_bits:
        said.append(
            f"WARNING {', '.join(last_bits)}: from here on results may differ in their last bits "
            "from those of a run without a change"
        )
    return tuple(said)


def _differences(key: str, old: Any, new: Any) -> Iterator[tuple[str, Any, Any]]:
    """Leaves that differ; a member of a union that took another's place is one, its ``kind``, and
    so is a list that has another length."""
    if isinstance(old, dict) and isinstance(new, dict):
        before, now = cast(dict[str, Any], old), cast(dict[str, Any], new)
        names = [*{**before, **now}]
        if before.get("kind") != now.get("kind"):
            names = ["kind"]
        for name in names:
            yield from _differences(f"{key}.{name}".lstrip("."), before.get(name), now.get(name))
    elif _sections(old) and _sections(new) and len(old) == len(new):
        for place, (before, now) in enumerate(zip(old, new, strict=True)):
            yield from _differences(f"{key}.{place}", before, now)
    elif old != new:
        yield key, old, new


def _sections(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(each, dict) for each in cast(list[Any], value)
    )


def _same_place(key: str, old: Any, new: Any, found: Found) -> bool:
    """Whether both name one file or folder; the old one from where the run was started then."""
    if plain_key(key) not in _PATHS:
        return False
    then = Path(found.state.get("cwd", ""))
    return _resolved(old, then) == _resolved(new, Path())


def _resolved(named: Any, folder: Path) -> Any:
    if isinstance(named, list):
        return [_resolved(each, folder) for each in cast(list[Any], named)]
    if not isinstance(named, str):
        return named
    place, _, name = named.rpartition(":")
    file, function = (place, name) if place.endswith(".py") else (named, "")
    path = folder / Path(file).expanduser()
    there = path.exists() or glob.has_magic(file)
    return (path.resolve(), function) if there else named
