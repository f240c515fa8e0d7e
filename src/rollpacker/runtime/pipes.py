"""Workers as processes of this machine, reached by pipes."""

from __future__ import annotations

import io
import multiprocessing
import os
import pickle
import socket
import struct
import sys
from collections.abc import Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollpacker.runtime.channel import Channel
from rollpacker.runtime.worker import WorkerSpec
from rollpacker.runtime.worker_process import main
from rollpacker.shield import shielded

# Workers are forked off a process that has imported what all of them need: half of the start's CPU
# time with two of them, and no imports are waited for when a job that lost its nodes starts again.
# The libraries of other systems are not made to be forked.
_START = "forkserver" if sys.platform == "linux" else "spawn"
PRELOADED = ("rollpacker.runtime.ready",)
_LEAVING_S = 5.0
"""In which a process that has closed its pipe is gone."""
_PATIENCE = 2
"""Heartbeats that the driver waits for a worker in the middle of a message. Whoever watches for
signs of life stands still meanwhile."""


class Pipe:
    """One end of a pipe."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def limit(self, seconds: float) -> None:
        """In the middle of a message, wait so long for the other end and raise
        ``BlockingIOError``; the pipe is of no use any more."""
        limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
        with socket.socket(fileno=os.dup(self._connection.fileno())) as end:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)

    def send(self, obj: Any, /) -> None:
        """Send a message."""
        self._connection.send_bytes(encode(obj))

    def recv(self) -> Any:
        """Wait for the next message."""
        return pickle.loads(self._connection.recv_bytes())

    def fileno(self) -> int:
        """Readable when a message, or the end, has come."""
        return self._connection.fileno()

    def close(self) -> None:
        """Say no more."""
        self._connection.close()


def encode(message: Any) -> memoryview:
    """A message as it goes through a pipe.

    With the newest protocol, since the one that a connection takes by itself copies every array
    twice, and without numpy's own way, which is Python code on both sides.
    """
    written = io.BytesIO()
    pickler = pickle.Pickler(written, pickle.HIGHEST_PROTOCOL)
    pickler.dispatch_table = _REDUCED
    pickler.dump(message)
    return written.getbuffer()


def _reduced(array: NDArray[Any]) -> Any:
    if array.ndim == 1 and array.flags.c_contiguous and not array.dtype.hasobject:
        return np.frombuffer, (pickle.PickleBuffer(array.data), array.dtype.str)
    return array.__reduce_ex__(pickle.HIGHEST_PROTOCOL)


_REDUCED = {np.ndarray: _reduced}


class LocalHost:
    """A worker process of this machine."""

    def __init__(self, spec: WorkerSpec) -> None:
        context = multiprocessing.get_context(_START)
        ours, theirs = context.Pipe()
        pipe = Pipe(ours)
        pipe.limit(_PATIENCE * spec.config.cluster.heartbeat_s)
        self.channel: Channel = pipe
        self._process = context.Process(
            target=main, args=(Pipe(theirs), spec), name=f"worker-{spec.rank}", daemon=True
        )
        with shielded():
            self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid or 0

    def wait(self, seconds: float) -> None:
        """Give it so long to end by itself."""
        self._process.join(seconds)

    def kill(self) -> None:
        """End it at once."""
        # It takes no SIGTERM, so the interpreter's own end would wait for it for ever.
        with shielded():
            self._process.kill()
            self._process.join()

    def end(self) -> str:
        """How it ended, in words."""
        self._process.join(_LEAVING_S)
        return f"exit code {self._process.exitcode}"


def start_local(specs: Sequence[WorkerSpec]) -> list[LocalHost]:
    """Start a process for each worker."""
    with shielded():
        # It comes with the first process otherwise, and unblocks signals as it does.
        resource_tracker.ensure_running()
    preloaded: list[str] = [*PRELOADED]
    if all(spec.device == "cpu" and spec.config.engine.kind == "vllm" for spec in specs):
        preloaded.append("rollpacker.engine.vllm")  # which asks for devices
    multiprocessing.set_forkserver_preload(preloaded)
    return [LocalHost(spec) for spec in specs]
