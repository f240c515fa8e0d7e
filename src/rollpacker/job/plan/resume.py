"""Whether a run starts anew or goes on from a checkpoint."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from rollpacker.config import RunConfig
from rollpacker.config.on_resume import of_change, plain_key
from rollpacker.core.journal import segments
from rollpacker.runtime.record.checkpoint import VerifiedCheckpoint

_PATHS = ("model.path", "data.path", "data.exclude", "rewards[].function", "environment.path")
"""Keys that may name a file or folder. Another spelling of the same path is no change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStart:
    """The beginning of a run: the checkpoint's folder and state, both None for a new run, and a
    line for each changed setting."""

    path: Path | None = None
    state: dict[str, Any] | None = None
    changed: tuple[str, ...] = ()

    @property
    def step(self) -> int:
        return 0 if self.state is None else int(self.state["counters"]["step"])


def choose_start(
    config: RunConfig, folder: Path, found: VerifiedCheckpoint | None, resume: bool
) -> RunStart:
    """Begin anew or go on. Raises ``ValueError`` if the folder holds a run that is not to be
    continued, or a run of another configuration."""
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
        return RunStart()
    if found is None:
        return RunStart()
    if config.devices.emulate is not None:
        raise ValueError(
            f"devices.emulate cannot go on from the checkpoint in {folder}: choose another folder "
            "with --out"
        )
    # Keys that are newer than the checkpoint get their defaults.
    before = RunConfig.model_validate(found.state["config"]).model_dump(mode="json")
    changed = _changes(found, before, config.model_dump(mode="json"))
    changed += _edited(found.state["code"], code_of(config))
    return RunStart(path=found.path, state=found.state, changed=changed)


def code_of(config: RunConfig) -> dict[str, str]:
    """Digests of the Python files that rewards, environment and data name, by the key."""
    named = {f"rewards.{n}.function": [each.function] for n, each in enumerate(config.rewards)}
    named["environment.path"] = [] if config.environment is None else config.environment.path
    named["data.path"] = _listed(config.data.path)
    found: dict[str, str] = {}
    for key, paths in named.items():
        names = (path if path.endswith(".py") else path.rpartition(":")[0] for path in paths)
        files = [Path(name).expanduser() for name in names if name.endswith(".py")]
        if held := b"".join(file.read_bytes() for file in files if file.is_file()):
            found[key] = hashlib.blake2b(held, digest_size=16).hexdigest()
    return found


def _edited(before: Mapping[str, str], now: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(
        f"WARNING {key}: its file has been edited, so training differs from here on"
        for key, digest in now.items()
        if before.get(key, digest) != digest
    )


def _changes(
    found: VerifiedCheckpoint, old: Mapping[str, Any], new: Mapping[str, Any]
) -> tuple[str, ...]:
    """Lines for the user on changes. Raises ``ValueError`` for one that is not allowed."""
    said: list[str] = []
    last_bits: list[str] = []
    scheduled = new["train"]["lr_scheduler_type"] != "constant"
    then = Path(found.state.get("cwd", ""))
    for where, before, now in _differences("", {key: old.get(key) for key in new}, new):
        if plain_key(where) in _PATHS and _located(before, then) == _located(now, Path()):
            continue
        kind = of_change(where, before, now, scheduled=scheduled)
        change = f"{where} was {before!r} and is {now!r}"
        if kind == "refused":
            raise ValueError(
                f"{found.path} was made with another config: '{where}' was {before!r}, now "
                f"{now!r}: change it back, or choose another folder with --out"
            )
        if kind == "logged":
            said.append(f"{change} from here on")
        elif kind == "rounding":
            last_bits.append(change)
    if last_bits:
        said.append(
            f"WARNING {', '.join(last_bits)}: from here on results may differ in rounding from "
            "those of a run without a change"
        )
    return tuple(said)


def _differences(key: str, old: Any, new: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield differing leaves: their key, old and new value. For another member of a union only
    ``kind`` differs, and a list of another length is one leaf. A section that comes or goes is
    followed by its values."""
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
        for name, value in _set_in(old) if new is None else ():
            yield f"{key}.{name}", value, None
        for name, value in _set_in(new) if old is None else ():
            yield f"{key}.{name}", None, value


def _set_in(section: Any) -> list[tuple[str, Any]]:
    if not isinstance(section, dict):
        return []
    return [(name, value) for name, value in cast(dict[str, Any], section).items() if value]


def _sections(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(each, dict) for each in cast(list[Any], value)
    )


def _located(named: Any, folder: Path) -> list[Any]:
    """The absolute paths of a key's files and folders, seen from ``folder``. Other names become
    paths too, which is harmless in a comparison."""
    return [_place(name, folder) for name in _listed(named)]


def _place(name: Any, folder: Path) -> Any:
    if not isinstance(name, str):
        return name
    file, _, function = name.rpartition(":")
    if not file.endswith(".py"):
        file, function = name, ""
    return (folder / Path(file).expanduser()).resolve(), function


def _listed(named: Any) -> list[Any]:
    return cast(list[Any], named) if isinstance(named, list) else [named]
