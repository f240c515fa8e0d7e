"""Whether a run starts anew or goes on from a checkpoint."""

from __future__ import annotations

import filecmp
import glob
import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from rollpacker.config import RunConfig
from rollpacker.config.reading.on_resume import of_change, plain_key
from rollpacker.core.journal import segments
from rollpacker.runtime.record.checkpoint import VerifiedCheckpoint

_PATHS = ("model.path", "data.path", "data.exclude", "rewards[].function", "environment.path")
"""Keys that may name a file or folder: another spelling of it is no change, and the same spelling
in another working directory may be one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStart:
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


def choose_start(
    config: RunConfig, folder: Path, found: VerifiedCheckpoint | None, resume: bool
) -> RunStart:
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
        return RunStart()
    if found is None:
        return RunStart()
    if config.devices.emulate is not None:
        raise ValueError(
            f"devices.emulate cannot go on from the checkpoint in {folder}: choose another folder "
            "with --out"
        )
    # A key that came later has its default.
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
        f"WARNING {key}: its file has been edited since: what is learned from here on is another"
        for key, digest in now.items()
        if before.get(key, digest) != digest
    )


def _changes(
    found: VerifiedCheckpoint, old: Mapping[str, Any], new: Mapping[str, Any]
) -> tuple[str, ...]:
    """What may change and did, in words. Raises ``ValueError`` on what may not."""
    said: list[str] = []
    last_bits: list[str] = []
    scheduled = new["train"]["lr_scheduler_type"] != "constant"
    for where, before, now in _differences("", {key: old.get(key) for key in new}, new):
        if plain_key(where) in _PATHS and _same_files(before, now, found):
            continue
        kind = of_change(where, before, now, scheduled=scheduled)
        change = f"{where} was {before!r} and is {now!r}"
        if kind == "refused":
            if before == now:
                before, now = _shown(before, _then(found)), _shown(now, Path())
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
    """Leaves that differ, and those that name files; a member of a union that took another's place
    is one, its ``kind``, and so is a list that has another length. A section that comes or goes is
    one together with what it sets."""
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
    elif old != new or plain_key(key) in _PATHS:
        yield key, old, new
        for name, value in _set_in(old) if new is None else ():
            yield f"{key}.{name}", value, None
        for name, value in _set_in(new) if old is None else ():
            yield f"{key}.{name}", None, value


def _set_in(section: Any) -> list[tuple[str, Any]]:
    """What a section that comes or goes has set."""
    if not isinstance(section, dict):
        return []
    return [(name, value) for name, value in cast(dict[str, Any], section).items() if value]


def _sections(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(each, dict) for each in cast(list[Any], value)
    )


def _then(found: VerifiedCheckpoint) -> Path:
    """Where the run was started then."""
    return Path(found.state.get("cwd", ""))


def _same_files(old: Any, new: Any, found: VerifiedCheckpoint) -> bool:
    """Whether both name the same, files and folders by what they hold."""
    before, now = _listed(old), _listed(new)
    if len(before) != len(now):
        return False
    pairs = zip(before, now, strict=True)
    return all(_same_file(a, b, _then(found)) for a, b in pairs)


def _same_file(old: Any, new: Any, then: Path) -> bool:
    was, now = _located(old, then), _located(new, Path())
    if was is None or now is None:
        # What is no longer where it was has moved, if its name is the same.
        return old == new and was is None
    return was == now or (was[1] == now[1] and _hold_the_same(was[0], now[0]))


def _listed(named: Any) -> list[Any]:
    return cast(list[Any], named) if isinstance(named, list) else [named]


def _located(named: Any, folder: Path) -> tuple[Path, str] | None:
    """The file, folder or pattern that a key names, and the function in it; None where there is
    none."""
    if not isinstance(named, str):
        return None
    place, _, name = named.rpartition(":")
    file, function = (place, name) if place.endswith(".py") else (named, "")
    path = folder / Path(file).expanduser()
    there = path.exists() or bool(_held(path))
    return (path.resolve(), function) if there else None


def _hold_the_same(one: Path, other: Path) -> bool:
    a, b = _held(one), _held(other)
    return [*a] == [*b] and all(filecmp.cmp(a[name], b[name], shallow=False) for name in a)


def _held(place: Path) -> dict[str, Path]:
    """Files by their names in a folder, or of a pattern; one that stands alone may have any."""
    if place.is_file():
        return {"": place}
    found = place.rglob("*") if place.is_dir() else map(Path, glob.glob(str(place), recursive=True))
    root = place if place.is_dir() else place.parent
    return {os.path.relpath(file, root): file for file in sorted(found) if file.is_file()}


def _shown(named: Any, folder: Path) -> Any:
    places = [(each, _located(each, folder)) for each in _listed(named)]
    shown = [each if at is None else ":".join(filter(None, map(str, at))) for each, at in places]
    return shown if isinstance(named, list) else shown[0]
