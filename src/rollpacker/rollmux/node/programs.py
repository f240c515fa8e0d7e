"""The programs of jobs on a node: started, stopped and looked at, as the daemon wants them.

What there is lies in files, a folder for each attempt (``keeper``): an agent that starts again
finds what the one before has started.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollpacker.core.codec import load
from rollpacker.rollmux.node import keeper
from rollpacker.rollmux.program import Program

_LEASE = "lease"
_LOST = 128 + 9
"""The code of a program whose keeper was killed: nobody saw its end."""


@dataclass(frozen=True, slots=True, order=True)
class AttemptName:
    """A start of a job's program, by the job and a number."""

    job: str
    number: int

    def __str__(self) -> str:
        return f"{self.job}.{self.number}"


class NodePrograms:
    """Starts and stops what the daemon names.

    Args:
        folder: of all attempts; made where it is missing, and readable by nobody else.
        known: what stands for ``{name}`` in an argument: ``url``, ``token_file`` and so on.
    """

    def __init__(self, folder: Path, known: Mapping[str, str]) -> None:
        self._folder = folder.resolve()
        self._known = known
        self._keepers: dict[AttemptName, subprocess.Popen[bytes]] = {}
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def renew(self, stop_at: float) -> None:
        """The node is ours until then, in monotonic seconds: what runs may go on until then."""
        new = self._folder / f"{_LEASE}.new"
        new.write_text(repr(stop_at), encoding="utf-8")
        new.replace(self._folder / _LEASE)

    def seen(self) -> list[dict[str, Any]]:
        """Every attempt that is here: job, number, and its code once it is over."""
        found = list[dict[str, Any]]()
        for name in self._names():
            found.append({"job": name.job, "number": name.number, "code": self._code(name)})
        return found

    def settle(self, wanted: Sequence[Mapping[str, Any]]) -> None:
        """Start what is new, ask what is to stop to end, and end and forget what nobody wants."""
        here = set(self._names())
        for each in wanted:
            name = AttemptName(each["job"], each["number"])
            if name not in here and not each["stop"]:
                self._start(name, load(each["program"], Program))
            elif name in here and each["stop"]:
                (self.folder(name) / "stop").touch()
            here.discard(name)
        for name in here:
            self._drop(name)

    def stop_all(self) -> None:
        """Kill everything at once: the node is not ours any more."""
        for name in self._names():
            (self.folder(name) / "kill").touch()

    def folder(self, name: AttemptName) -> Path:
        """An attempt's own."""
        return self._folder / str(name)

    def log(self, name: AttemptName) -> Path:
        """What it printed."""
        return self.folder(name) / "log"

    def _names(self) -> list[AttemptName]:
        """Those that were begun, the oldest first."""
        found = list[AttemptName]()
        for path in self._folder.glob("*.*/program.json"):
            job, _, number = path.parent.name.rpartition(".")
            if number.isdecimal():
                found.append(AttemptName(job, int(number)))
        return sorted(found)

    def _start(self, name: AttemptName, program: Program) -> None:
        folder = self.folder(name)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700)
        told = {
            "argv": [self._filled(part, name) for part in program.command],
            "folder": program.folder,
            "environment": dict(program.environment),
            "stop_s": program.stop_s,
            "lease": str(self._folder / _LEASE),
        }
        (folder / "new").write_text(json.dumps(told), encoding="utf-8")
        (folder / "new").replace(folder / "program.json")
        # Its own session: what ends an agent or its terminal is not meant for it.
        self._keepers[name] = subprocess.Popen(
            [sys.executable, "-S", "-E", keeper.__file__, str(folder)],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )

    def _filled(self, part: str, name: AttemptName) -> str:
        known = {**self._known, "job": name.job, "attempt": str(name.number)}
        for key, value in known.items():
            part = part.replace(f"{{{key}}}", value)
        return part

    def _code(self, name: AttemptName) -> int | None:
        """None while it runs."""
        if name in self._keepers:
            self._keepers[name].poll()
        with contextlib.suppress(FileNotFoundError):
            return int((self.folder(name) / "exit").read_text(encoding="utf-8"))
        if self._kept(name):
            return None
        with contextlib.suppress(FileNotFoundError):  # written before the lock was let go
            return int((self.folder(name) / "exit").read_text(encoding="utf-8"))
        return _LOST

    def _kept(self, name: AttemptName) -> bool:
        """Whether its keeper lives."""
        mine = self._keepers.get(name)
        if mine is not None:
            return mine.poll() is None
        with contextlib.suppress(FileNotFoundError):
            handle = os.open(self.folder(name) / "lock", os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return True
            finally:
                os.close(handle)
        return False

    def _drop(self, name: AttemptName) -> None:
        """End one that nobody wants; forget it when it is over."""
        if self._code(name) is None:
            (self.folder(name) / "kill").touch()
            return
        shutil.rmtree(self.folder(name), ignore_errors=True)
        self._keepers.pop(name, None)
