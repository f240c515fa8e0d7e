"""Checkpoints that survive a kill at any moment, and that are used only if every byte is verified.

A checkpoint is written under a temporary name. While training goes on, it is flushed, read once for
a ``MANIFEST`` (size and BLAKE2b of every file) and renamed. Resume takes the newest checkpoint
whose manifest verifies.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollpacker.durable import disk_full, replace_file, sync, write_file

_NAME = "checkpoint-"
_TEMPORARY = ".tmp-"
_REPLACED = ".old-"
_MANIFEST = "MANIFEST"
_STATE = "state.json"
_BEST = "best.json"
_FORMAT = 1

Entry = dict[str, int | str]


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written. Older checkpoints are unchanged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedCheckpoint:
    """A checkpoint with every byte verified. ``state`` is that of ``write``, read from JSON."""

    step: int
    path: Path
    state: dict[str, Any]


class Checkpoints:
    """The checkpoints of one run. The constructor cleans up after a crash, so hold the ``RunLock``.
    ``keep``: the number of kept checkpoints, at least 2."""

    def __init__(self, folder: Path, keep: int = 2) -> None:
        if keep < 2:
            raise ValueError(f"checkpoint.keep is {keep}: keep at least 2")
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.problems: list[str] = []
        self._keep = keep
        self._damaged: set[int] = set()
        self._clean()
        marker = self.marker()
        self._best = None if marker is None else marker["step"]

    def latest(self) -> VerifiedCheckpoint | None:
        """The newest checkpoint that verifies. ``problems`` gets a line on each newer one."""
        found, self.problems = search(self.folder)
        steps = (_step(path) for path in _newest_first(self.folder))
        self._damaged = {step for step in steps if found is None or step > found.step}
        return found

    def marker(self) -> dict[str, Any] | None:
        """The last argument of ``keep_best``, None if there is none that can be read."""
        try:
            marker = json.loads((self.folder / _BEST).read_bytes())
            return {"value": float(marker["value"]), "metric": str(marker["metric"])} | {
                "step": int(marker["step"]),
                "checkpoint": str(marker["checkpoint"]),
            }
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def there(self, step: int) -> bool:
        """Whether the checkpoint of ``step`` exists and was not found to be damaged."""
        whole = (self.folder / f"{_NAME}{step}" / _MANIFEST).exists()
        return whole and step not in self._damaged

    def keep_best(self, marker: dict[str, Any] | None) -> None:
        """Keep the checkpoint of ``marker["step"]`` besides the newest, in place of the former
        best. ``best.json`` has the marker. Raises ``OSError``."""
        if marker is None:
            (self.folder / _BEST).unlink(missing_ok=True)
        else:
            replace_file(self.folder / _BEST, json.dumps(marker, indent=1).encode() + b"\n")
        self._best = None if marker is None else int(marker["step"])

    def write(self, step: int, write: Callable[[Path], None], state: dict[str, Any]) -> None:
        """Write a future ``checkpoint-<step>``, after the last one was committed.

        Args:
            step: names the checkpoint. One of the same step is replaced.
            write: writes its files into the given folder.
            state: JSON values for ``state.json``.

        Raises:
            CheckpointError: the disk is full or fails. Nothing that was there before has changed.
        """
        encoded = json.dumps(state, indent=1).encode()
        with self._whole(step) as (temporary, _):
            temporary.mkdir()
            write(temporary)
            # The state has the configuration, whose options may be secrets.
            write_file(temporary / _STATE, encoded, mode=0o600)

    def commit(self, step: int) -> Path:
        """Make the checkpoint durable, rename it, and delete the older ones beyond ``keep``. Raises
        ``CheckpointError`` as ``write`` does."""
        with self._whole(step) as (temporary, final):
            _seal(temporary)
            replaced = self.folder / f"{_REPLACED}{final.name}"
            if final.exists():
                final.rename(replaced)
            temporary.rename(final)
            sync(self.folder)
            if replaced.exists():
                self._delete(replaced)
        self._damaged.discard(step)
        kept = 0
        for path in _newest_first(self.folder):
            if _step(path) == self._best:
                continue
            if kept >= self._keep:
                self._delete(path)
            kept += _step(path) not in self._damaged
        return final

    @contextmanager
    def _whole(self, step: int) -> Iterator[tuple[Path, Path]]:
        """A checkpoint's temporary folder and final name. If its use fails, it is removed."""
        final = self.folder / f"{_NAME}{step}"
        try:
            yield self.folder / f"{_TEMPORARY}{final.name}", final
        except BaseException as error:
            self._clean()
            if isinstance(error, OSError) or disk_full(error):
                raise CheckpointError(_explain(final, error)) from error
            raise

    def _delete(self, path: Path) -> None:
        """Rename first: a kill meanwhile must not leave half a checkpoint under its name."""
        doomed = self.folder / f"{_TEMPORARY}deleted-{path.name}"
        path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)

    def _clean(self) -> None:
        for path in self.folder.glob(f"{_REPLACED}{_NAME}*"):
            final = self.folder / path.name.removeprefix(_REPLACED)
            if final.exists():
                self._delete(path)
            else:
                path.rename(final)
        for path in self.folder.glob(f"{_TEMPORARY}*{_NAME}*"):
            shutil.rmtree(path, ignore_errors=True)


def search(folder: Path) -> tuple[VerifiedCheckpoint | None, list[str]]:
    """The newest checkpoint that verifies, and one line on each newer one that does not."""
    problems: list[str] = []
    for path in _newest_first(folder):
        problem = verify(path)
        if problem is None:
            state = json.loads((path / _STATE).read_bytes())
            return VerifiedCheckpoint(step=_step(path), path=path, state=state), problems
        problems.append(f"{path.name} is not usable: {problem}")
    return None, problems


def newest_step(folder: Path) -> int:
    """The step of a run's newest checkpoint, intact or not, -1 if there is none."""
    return max(map(_step, _newest_first(folder)), default=-1)


def verify(path: Path) -> str | None:
    """Compare every byte below ``path`` with its manifest. Returns the problem, or None."""
    try:
        listed = _read_manifest(path / _MANIFEST)
        present = _files(path)
        names = set(listed)
        for what, odd in (("missing", names - present), ("extra", present - names)):
            if odd:
                return f"{what} file {min(odd)}"
        found = _entries(path, names)
    except (OSError, ValueError) as error:
        return f"cannot be read: {error}"
    for name, entry in listed.items():
        if found[name] != entry:
            size, listed_size = found[name]["size"], entry["size"]
            torn = f"{name} is torn: {size} bytes instead of {listed_size}"
            return torn if size != listed_size else f"{name} changed"
    return None


def _seal(folder: Path) -> None:
    names = _files(folder)
    with ThreadPoolExecutor(1) as pool:  # the disk writes while the digests are computed
        flushing = pool.map(sync, [folder / name for name in sorted(names)])
        entries = _entries(folder, names)
        _ = [*flushing]  # raises errors
    write_file(folder / _MANIFEST, _encode(entries))
    for inner in sorted((p for p in folder.rglob("*") if p.is_dir()), reverse=True):
        sync(inner)
    sync(folder)


def _encode(files: dict[str, Entry]) -> bytes:
    manifest = {"format": _FORMAT, "files": dict(sorted(files.items()))}
    return json.dumps(manifest, indent=1).encode() + b"\n"


def _read_manifest(path: Path) -> dict[str, Entry]:
    """Listed files. Raises ``ValueError`` unless the bytes are exactly those of ``_encode``."""
    data = path.read_bytes()
    try:
        files = json.loads(data)["files"]
        intact = _encode(files) == data
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        intact, files = False, {}
    if not intact or _STATE not in files:
        raise ValueError(f"{_MANIFEST} is damaged")
    return files


def _files(folder: Path) -> set[str]:
    paths = (path for path in folder.rglob("*") if not path.is_dir())
    return {path.relative_to(folder).as_posix() for path in paths} - {_MANIFEST}


def _entries(folder: Path, names: set[str]) -> dict[str, Entry]:
    """Size and digest of each file. Hashing releases the interpreter lock, so threads help."""
    ordered = sorted(names)
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return dict(zip(ordered, pool.map(lambda n: _entry(folder / n), ordered), strict=True))


def _entry(path: Path) -> Entry:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=32))
        return {"size": file.tell(), "blake2b": digest.hexdigest()}


def _newest_first(folder: Path) -> list[Path]:
    paths = (p for p in folder.glob(f"{_NAME}*") if p.name.removeprefix(_NAME).isdecimal())
    return sorted(paths, key=_step, reverse=True)


def _step(path: Path) -> int:
    return int(path.name.rpartition("-")[2])


def _explain(path: Path, error: BaseException) -> str:
    if disk_full(error):
        return f"{path}: no space left: free some or change 'output' (older checkpoints are kept)"
    return f"{path}: cannot be written: {error} (older checkpoints are kept)"
