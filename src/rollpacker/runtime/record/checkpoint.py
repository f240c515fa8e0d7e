"""Checkpoints that survive a kill at any moment, and that are believed only when every byte is.

A checkpoint is written beside its final name. Then, while training goes on, it is flushed, read
once for a ``MANIFEST`` (size and BLAKE2b of every file) and renamed: before that it is none. Resume
takes the newest one whose manifest verifies; nothing else is verified.
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
    """A checkpoint cannot be written; the ones before it are untouched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedCheckpoint:
    """A checkpoint whose every byte was verified.

    Args:
        step: its step.
        path: its folder.
        state: what ``write`` was given, after a round trip through JSON.
    """

    step: int
    path: Path
    state: dict[str, Any]


class Checkpoints:
    """The checkpoints of one run. Building it cleans up after a crash: hold the ``RunLock``.

    Args:
        folder: the run's folder; made if missing.
        keep: how many checkpoints are kept, at least 2.
    """

    def __init__(self, folder: Path, keep: int = 2) -> None:
        if keep < 2:
            raise ValueError(f"checkpoint.keep is {keep}; at least 2 must be kept")
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.problems: list[str] = []
        self._keep = keep
        self._damaged: set[int] = set()
        self._clean()
        marker = self.marker()
        self._best = None if marker is None else marker["step"]

    def latest(self) -> VerifiedCheckpoint | None:
        """The newest checkpoint that verifies; ``problems`` then says what is wrong with newer."""
        found, self.problems = search(self.folder)
        steps = (_step(path) for path in _newest_first(self.folder))
        self._damaged = {step for step in steps if found is None or step > found.step}
        return found

    def marker(self) -> dict[str, Any] | None:
        """What ``keep_best`` was given last; None when there is none that can be read."""
        try:
            marker = json.loads((self.folder / _BEST).read_bytes())
            return {"value": float(marker["value"]), "metric": str(marker["metric"])} | {
                "step": int(marker["step"]),
                "checkpoint": str(marker["checkpoint"]),
            }
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def there(self, step: int) -> bool:
        """Whether the checkpoint of ``step`` is there, and was not found to be damaged."""
        whole = (self.folder / f"{_NAME}{step}" / _MANIFEST).exists()
        return whole and step not in self._damaged

    def keep_best(self, marker: dict[str, Any] | None) -> None:
        """Keep the checkpoint of ``marker["step"]`` besides the newest, in place of the one before.

        ``best.json`` says so. Raises ``OSError``.
        """
        if marker is None:
            (self.folder / _BEST).unlink(missing_ok=True)
        else:
            replace_file(self.folder / _BEST, json.dumps(marker, indent=1).encode() + b"\n")
        self._best = None if marker is None else int(marker["step"])

    def write(self, step: int, write: Callable[[Path], None], state: dict[str, Any]) -> None:
        """Write what is to be ``checkpoint-<step>``, after the one before was committed.

        Args:
            step: names the checkpoint; one of the same step is replaced.
            write: puts its files, in any layout, into the folder that it is given.
            state: JSON values, written to ``state.json``.

        Raises:
            CheckpointError: disk full or failing; nothing that was there before has changed.
        """
        encoded = json.dumps(state, indent=1).encode()
        with self._whole(step) as (temporary, _):
            temporary.mkdir()
            write(temporary)
            # With the configuration, whose options may be secrets.
            write_file(temporary / _STATE, encoded, mode=0o600)

    def commit(self, step: int) -> Path:
        """Make it durable and give it its name, then delete what is older than the kept ones.

        Raises ``CheckpointError`` as ``write`` does.
        """
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
        """The folder that becomes a checkpoint, and its name then; where that fails nothing of it
        is left."""
        final = self.folder / f"{_NAME}{step}"
        try:
            yield self.folder / f"{_TEMPORARY}{final.name}", final
        except BaseException as error:
            self._clean()
            if isinstance(error, OSError) or disk_full(error):
                raise CheckpointError(_explain(final, error)) from error
            raise

    def _delete(self, path: Path) -> None:
        """Rename, then remove: a kill in between must not leave half a checkpoint by its name."""
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
    """Of a run's newest checkpoint, intact or not; -1 where it has none."""
    return max(map(_step, _newest_first(folder)), default=-1)


def verify(path: Path) -> str | None:
    """Compare every byte below ``path`` with its manifest; what is wrong, or None."""
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
    """Flush every file and folder, with the manifest last."""
    names = _files(folder)
    with ThreadPoolExecutor(1) as pool:  # the disk writes while the digests are computed
        flushing = pool.map(sync, [folder / name for name in sorted(names)])
        entries = _entries(folder, names)
        _ = [*flushing]  # which raises what went wrong
    write_file(folder / _MANIFEST, _encode(entries))
    for inner in sorted((p for p in folder.rglob("*") if p.is_dir()), reverse=True):
        sync(inner)
    sync(folder)


def _encode(files: dict[str, Entry]) -> bytes:
    manifest = {"format": _FORMAT, "files": dict(sorted(files.items()))}
    return json.dumps(manifest, indent=1).encode() + b"\n"


def _read_manifest(path: Path) -> dict[str, Entry]:
    """Listed files. Raises ``ValueError`` unless the bytes are exactly what ``_encode`` writes."""
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
    """Size and digest of each file; hashing releases the interpreter lock, so threads help."""
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
        return f"{path}: no space left; free some or change 'output' (older checkpoints are kept)"
    return f"{path}: cannot be written: {error} (older checkpoints are kept)"
