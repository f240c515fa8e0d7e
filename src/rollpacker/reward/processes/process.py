"""A grading process as the driver sees it: started, and given jobs."""

from __future__ import annotations

import contextlib
import mmap
import os
import pickle
import struct
import tempfile
import time
import weakref
from array import array
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import repeat
from pathlib import Path
from typing import Any

from rollpacker.processes.fork_server import fork_child
from rollpacker.processes.frames import HEADER, Channel, frame
from rollpacker.processes.supervised import SupervisedProcess
from rollpacker.reward.base import GradeRequest

# A row of many kilobytes is written to a file once, and jobs name the file. A smaller one is sent
# with every job. Each call gets a copy, so no function changes the row of another response.

LARGE = 1 << 16  # rows of at least so many bytes go by a file
MOST = 1 << 28  # bytes of files kept for rows that may come again

Row = Mapping[str, Any]


class RowFile:
    """A large row's file, deleted with the last job that needs it."""

    def __init__(self, row: Row, packed: bytes) -> None:
        descriptor, self.path = tempfile.mkstemp(prefix="rollpacker-row-")
        weakref.finalize(self, Path(self.path).unlink, missing_ok=True)
        self.row = row  # keep a reference, so that no other row gets its id
        self.size = len(packed)
        with os.fdopen(descriptor, "wb") as file:
            file.write(packed)


class RowFiles:
    """The driver's files of large rows, the oldest first."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._files: dict[int, RowFile] = {}
        self._bytes = 0

    def __bool__(self) -> bool:
        return bool(self._files)

    def of(self, row: Row) -> RowFile | None:
        return self._files.get(id(row))

    def add(self, rows: Iterable[Row]) -> bool:
        """Write the large rows that have no file yet. Return whether there were any. Raises what
        pickle raises."""
        added = False
        for row in {id(row): row for row in rows if id(row) not in self._files}.values():
            packed = pickle.dumps(row, pickle.HIGHEST_PROTOCOL)
            if LARGE <= len(packed) <= self._most:
                with contextlib.suppress(OSError):  # on a full disk the job carries the row
                    self._files[id(row)] = RowFile(row, packed)
                    self._bytes += len(packed)
                    added = True
        while self._bytes > self._most:
            self._bytes -= self._files.pop(next(iter(self._files))).size
        return added

    def forget(self) -> None:
        """Keep files only for jobs that have been sent."""
        self._files.clear()
        self._bytes = 0


def load_row(path: str) -> Row:
    """Return a copy of a large row."""
    return pickle.loads(_mapped(path))


@lru_cache(maxsize=64)
def _mapped(path: str) -> mmap.mmap:
    # Mapped, not read: its memory is the page cache's, which all grading processes share.
    with open(path, "rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


JOB = struct.Struct("<Q")  # a job's number, from 1 on, at the head of its frame
_BUILT_IN = {"code": "rollpacker.reward.code", "math": "rollpacker.reward.math"}
Loaded = tuple[str, dict[str, Any], list[str] | None]
"""A function for a process to load: its path, its options, and the columns of its rows."""


@dataclass(slots=True, eq=False)
class GradingJob:
    """One call of each of some functions on the same requests: one response, or a group.

    Args:
        functions: indices of the reward functions still to call.
        failed_in: the process that it failed in last. Another one should try it next.
        files: of large rows. They must stay until the job is over.
    """

    id: int
    requests: tuple[GradeRequest, ...]
    functions: list[int]
    failures: int = 0
    failed_in: object = None
    files: list[RowFile | None] = field(default_factory=list[RowFile | None])

    def encode(self, rows: RowFiles) -> bytes:
        """Return the job as a frame. Raises what pickle raises on columns that it cannot write."""
        body = self._body(rows)
        if len(body) >= LARGE and rows.add(r.row for r in self.requests):
            body = self._body(rows)
        return b"".join((HEADER.pack(JOB.size + len(body)), JOB.pack(self.id), body))

    def _body(self, rows: RowFiles) -> bytes:
        self.files = [rows.of(r.row) for r in self.requests] if rows else []
        plain = list(map(_plain, self.requests, self.files or repeat(None)))
        return pickle.dumps((self.functions, plain), pickle.HIGHEST_PROTOCOL)

    def cancellation(self) -> bytes:
        return frame(JOB.pack(self.id))


def _plain(r: GradeRequest, file: RowFile | None) -> tuple[Any, ...]:
    row = r.row if file is None else file.path
    ids = r.completion_ids
    packed = pickle.PickleBuffer(ids if isinstance(ids, memoryview) else array("i", ids))
    state = r.state
    progress = (state.global_step, state.max_steps, state.epoch, state.num_train_epochs)
    times = tuple(r.timeouts_s)
    return r.attempt, r.prompt, r.completion, packed, row, times, progress, r.messages


@dataclass(slots=True, eq=False)
class GradingProcess(SupervisedProcess):
    """One process and its unanswered jobs, the running one first. ``call_started``: latest time at
    which its call can have begun. ``start_s``: seconds of loading its functions."""

    jobs: deque[GradingJob] = field(default_factory=deque)
    call_started: float = 0.0
    start_s: float = 0.0

    @property
    def busy(self) -> bool:
        return bool(self.jobs)


def _preloaded(functions: Sequence[Loaded]) -> list[str]:
    # Only modules that each process imports anyway. Model libraries would open devices.
    built_in = (_BUILT_IN[name] for name, _, _ in functions if name in _BUILT_IN)
    return ["rollpacker.reward.processes.worker", "tokenizers", *sorted(built_in)]


def start(functions: Sequence[Loaded], read: bytes, checked: bool) -> GradingProcess:
    """Start a process that loads these functions and then takes jobs. ``channel.flush`` may have to
    follow. ``read`` is pickled. ``checked``: another process has verified the sandbox."""
    popen, ours = fork_child("rollpacker.reward.processes.worker", _preloaded(functions))
    channel = Channel(ours)
    channel.send(frame(pickle.dumps((list(functions), read, checked))))
    return GradingProcess(popen=popen, channel=channel, started=time.monotonic())
