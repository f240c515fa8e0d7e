"""A worker's loop: commands of the driver first, then the role's own work."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from threading import Event, Lock, Thread
from typing import Any, Protocol

from rollpacker.config import RunConfig
from rollpacker.core.types import EngineId, ReplicaId
from rollpacker.engine.base import ALONE, Span
from rollpacker.runtime.ipc.link import Wire
from rollpacker.runtime.messages import messages as msg

Send = Callable[[msg.Report], None]
Commands = Mapping[type, Callable[[Any], None]]
"""The handler of each kind of command."""
_LEAVING_S = 30.0
"""Seconds for a worker to end its work when the driver is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePart:
    """A worker's part in an engine. ``engine``: number of the first smallest engine on its devices.
    ``resting``: it sleeps until it is needed, as another engine decodes on its devices."""

    engine: EngineId
    span: Span = ALONE
    resting: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaPart:
    """A worker's part in a training replica."""

    replica: ReplicaId
    span: Span = ALONE


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """The specification of a worker, which is a part of an engine, a replica, or both. ``cores``:
    CPU cores to stay on, empty for any. ``device``: ``cpu`` or ``cuda:N``."""

    config: RunConfig
    rank: int
    cores: tuple[int, ...]
    device: str
    max_length: int
    total_updates: int
    engine: EnginePart | None
    replica: ReplicaPart | None


class Role(Protocol):
    """The role of a worker: an engine, a replica, or both."""

    commands: Commands

    @property
    def at(self) -> str:
        """Its current work in words. Empty if another process has to end it."""
        ...

    def busy(self) -> bool:
        """Whether there is work between commands."""
        ...

    def work(self) -> bool | None:
        """Do a short piece of work, as commands wait meanwhile. False: it made no progress."""
        ...

    def close(self) -> None: ...


def prepare(spec: WorkerSpec) -> None:
    """Set up the process."""
    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(spec.config.devices.threads)
    torch.manual_seed(spec.config.seed)
    if spec.device != "cpu":
        if not torch.cuda.is_available():  # else torch shows a traceback
            raise ValueError(
                f"{spec.device} exists, but torch cannot use it: update the NVIDIA driver to one "
                f"for CUDA {torch.version.cuda}, or set devices.kind=cpu"
            )
        torch.cuda.set_device(spec.device)


def prepared(spec: WorkerSpec) -> tuple[Any, Any]:
    """Set up the process. Returns the model on its device, and the tokenizer. Raises
    ``ValueError``."""
    from rollpacker.train.model.loading import load_model

    prepare(spec)
    return load_model(spec.config.model, spec.device)


class Heartbeat:
    """Sends a process's reports and, from its own thread, regular heartbeats."""

    def __init__(
        self, channel: Wire, heartbeat_s: float, beat: Callable[[], Any] = msg.Beat
    ) -> None:
        self._channel = channel
        self._make = beat
        self._heartbeat_s = heartbeat_s
        self._sending = Lock()
        self.stopped = Event()
        Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def send(self, report: Any) -> None:
        """Send a report. Raises ``OSError`` if the driver is gone."""
        with self._sending:
            self._channel.send(report)

    def _beat(self) -> None:
        try:
            while not self.stopped.wait(self._heartbeat_s):
                self.send(self._make())
        except OSError:
            return  # the driver is gone, which the serving thread notices too


class Server:
    """Serves a driver: its commands first, then the role's own work."""

    def __init__(self, channel: Wire, heartbeat_s: float) -> None:
        self._channel = channel
        self._inbox: SimpleQueue[msg.Command | None] = SimpleQueue()
        self._at = ""
        self._done = 0
        self._longest_s: dict[str, float] = {}
        self._beating = Heartbeat(channel, heartbeat_s, self._beat)
        self.send: Send = self._beating.send
        # Read all the time: two processes that both wait for the other to read would wait for ever.
        Thread(target=self._listen, name="inbox", daemon=True).start()

    def serve(self, build: Callable[[Send], Role]) -> None:
        """Serve until ``Stop``. Raises ``EOFError`` or ``OSError`` if the driver is gone."""
        try:
            with closing(build(self.send)) as role:
                gc.collect()
                gc.freeze()  # collections need not walk the libraries' objects again and again
                self._serve(role)
        finally:
            self._beating.stopped.set()

    def _beat(self) -> msg.Beat:
        at = self._at
        return msg.Beat(at=at, done=self._done, longest_s=self._longest_s.get(at))

    def _serve(self, role: Role) -> None:
        while True:
            if role.busy() and self._inbox.empty():
                self._do(role.at, role.work)
                continue
            self._at = ""
            command = self._inbox.get()
            if command is None:
                raise EOFError
            if isinstance(command, msg.Stop):
                return
            act = partial(role.commands[type(command)], command)
            self._do(f"the command {type(command).__name__}", act)

    def _do(self, what: str, act: Callable[[], bool | None]) -> None:
        self._at, began = what, time.monotonic()
        self._done += act() is not False
        took = time.monotonic() - began
        self._longest_s[what] = max(self._longest_s.get(what, 0.0), took)

    def _listen(self) -> None:
        try:
            while True:
                self._inbox.put(self._channel.recv())
        except (EOFError, OSError):
            self._inbox.put(None)
            # A worker in a collective with lost workers would wait for ever.
            if not self._beating.stopped.wait(_LEAVING_S):
                os._exit(1)
