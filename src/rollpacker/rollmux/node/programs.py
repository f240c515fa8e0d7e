"""The programs of jobs on a node. Files hold their state, so that a restarted agent finds it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollpacker.core.codec import load
from rollpacker.rollmux.model.program import JobProgram
from rollpacker.rollmux.node import keeper

_LEASE = "lease"
_LOST = 128 + 9  # code of a program whose keeper was killed, since nobody saw its end


@dataclass(frozen=True, slots=True, order=True)
class AttemptName:
    """A start of a job's program: the job and a number."""

    job: str
    number: int

    def __str__(self) -> str:
        return f"{self.job}.{self.number}"


class NodePrograms:
    """Starts and stops the attempts that the daemon names.

    Args:
        folder: parent of all attempts (created if missing, with access for its owner only).
        known: values for ``{name}`` in an argument: ``url``, ``token_file`` and so on.
    """

    def __init__(self, folder: Path, known: Mapping[str, str]) -> None:
        self._folder = folder.resolve()
        self._known = known
        self._keepers: dict[AttemptName, subprocess.Popen[bytes]] = {}
        self._unstarted = set[AttemptName]()
        """Attempts that failed because the disk had no room. Their folders are gone."""
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def renew(self, stop_at: float) -> None:
        """Let programs run until ``stop_at``, in monotonic seconds."""
        new = self._folder / f"{_LEASE}.new"
        new.write_text(repr(stop_at), encoding="utf-8")
        new.replace(self._folder / _LEASE)

    def seen(self) -> list[dict[str, Any]]:
        """Every attempt here: job, number, exit code (None while it runs) and whether it was
        stopped."""
        found = list[dict[str, Any]]()
        for name in self._names():
            asked = any((self.folder(name) / how).exists() for how in ("stop", "kill"))
            told = {"job": name.job, "number": name.number, "stopped": asked}
            found.append(told | {"code": self._code(name)})
        for name in sorted(self._unstarted):
            told = {"job": name.job, "number": name.number, "stopped": False}
            found.append(told | {"code": keeper.NOT_STARTED})
        return found

    def settle(self, wanted: Sequence[Mapping[str, Any]]) -> list[AttemptName]:
        """Start new attempts, stop marked ones, and end all others. Returns the started ones."""
        told = {AttemptName(each["job"], each["number"]): each for each in wanted}
        self._unstarted &= told.keys()
        for name in self._names():
            if name not in told:
                self._drop(name)
        for name, each in told.items():
            if each["stop"] and self._waits(name):
                self._skip(name)
            elif each["stop"]:
                (self.folder(name) / "stop").touch()
        # One attempt per job at a time: the last one may take a moment to end.
        left = {name.job for name in self._names() if name not in told}
        started = list[AttemptName]()
        for name, each in told.items():
            if not each["stop"] and name.job not in left and self._waits(name):
                try:
                    self._start(name, load(each["program"], JobProgram), each)
                except OSError:
                    shutil.rmtree(self.folder(name), ignore_errors=True)
                    self._unstarted.add(name)
                    continue
                started.append(name)
        return started

    def stop_all(self) -> None:
        for name in self._names():
            (self.folder(name) / "kill").touch()

    def folder(self, name: AttemptName) -> Path:
        return self._folder / str(name)

    def log(self, name: AttemptName) -> Path:
        return self.folder(name) / "log"

    def _names(self) -> list[AttemptName]:
        found = list[AttemptName]()
        for path in self._folder.glob("*.*/program.json"):
            job, _, number = path.parent.name.rpartition(".")
            if number.isdecimal():
                found.append(AttemptName(job, int(number)))
        return sorted(found)

    def _waits(self, name: AttemptName) -> bool:
        """Whether it is still to be started. An agent may have been killed just before it did."""
        if (
            name in self._keepers
            or name in self._unstarted
            or self._begun(name)
            or self._written(name) is not None
        ):
            return False
        with self._unkept(name) as unkept:
            return unkept

    def _skip(self, name: AttemptName) -> None:
        """Report an attempt as over that was stopped before it started."""
        folder = self.folder(name)
        folder.mkdir(mode=0o700, exist_ok=True)
        (folder / "stop").touch()
        (folder / "exit").write_text(str(128 + signal.SIGTERM), encoding="utf-8")
        (folder / "program.json").touch()

    def _begun(self, name: AttemptName) -> bool:
        return self.log(name).exists()

    def _start(self, name: AttemptName, program: JobProgram, wanted: Mapping[str, Any]) -> None:
        folder = self.folder(name)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700)
        place = {"rank": str(wanted["rank"]), "nodes": ",".join(wanted["nodes"])}
        told = {
            "argv": [self._filled(part, name, place) for part in program.command],
            "folder": program.folder,
            "environment": dict(program.environment),
            "stop_s": program.stop_s,
            "lease": str(self._folder / _LEASE),
        }
        (folder / "new").write_text(json.dumps(told), encoding="utf-8")
        (folder / "new").replace(folder / "program.json")
        # Its own session, so that signals to the agent or its terminal do not reach it.
        self._keepers[name] = subprocess.Popen(
            [sys.executable, "-S", "-E", keeper.__file__, str(folder)],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )

    def _filled(self, part: str, name: AttemptName, place: Mapping[str, str]) -> str:
        known = {**self._known, **place, "job": name.job, "attempt": str(name.number)}
        for key, value in known.items():
            part = part.replace(f"{{{key}}}", value)
        return part

    def _code(self, name: AttemptName) -> int | None:
        if (code := self._written(name)) is not None:
            return code
        with self._unkept(name) as unkept:
            if not unkept:
                return None
        if (code := self._written(name)) is not None:  # written before the lock was released
            return code
        if name not in self._keepers and not self._begun(name):
            return None
        if left := keeper.marked(str(self.folder(name))):
            keeper.send(left, signal.SIGKILL)
            return None
        return _LOST

    def _written(self, name: AttemptName) -> int | None:
        with contextlib.suppress(FileNotFoundError):
            return int((self.folder(name) / "exit").read_text(encoding="utf-8"))
        return None

    @contextlib.contextmanager
    def _unkept(self, name: AttemptName) -> Iterator[bool]:
        """Whether no keeper of it lives. None can begin inside the context."""
        mine = self._keepers.get(name)
        if not self.folder(name).exists() or (mine is not None and mine.poll() is None):
            yield mine is None or mine.poll() is not None
            return
        handle = os.open(self.folder(name) / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
        else:
            yield True
        finally:
            os.close(handle)

    def _drop(self, name: AttemptName) -> None:
        if self._code(name) is None and self._begun(name):
            (self.folder(name) / "kill").touch()
            return
        with self._unkept(name) as unkept:
            if unkept:
                # Remove this file first: a folder without it is never read again.
                (self.folder(name) / "program.json").unlink(missing_ok=True)
                shutil.rmtree(self.folder(name), ignore_errors=True)
                self._keepers.pop(name, None)
