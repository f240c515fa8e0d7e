"""The grading process: the only place where reward functions run.

It takes jobs in order and writes one reply per call, as JSON: what it writes is checked by the
driver and never unpickled.
"""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import signal
import socket
import sys
import time
from collections.abc import Sequence
from typing import IO, Any

from rollpacker.core.types import AttemptId
from rollpacker.reward.base import GradeRequest
from rollpacker.reward.functions import Scorer, one_line, resolve
from rollpacker.reward.wire import HEADER, JOB, frame

_PR_SET_PDEATHSIG = 1


def main(descriptor: int, parent: int) -> None:
    """Serve the driver at the other end of the socket until it closes."""
    _die_with(parent)
    sock = socket.socket(fileno=descriptor)
    with sock, sock.makefile("rb") as inbox:
        functions: list[tuple[str, dict[str, Any]]] = pickle.loads(_read(inbox) or b"")
        try:
            scorers = [resolve(name, options) for name, options in functions]
        except BaseException as error:  # the user's module may even exit
            text = str(error) if isinstance(error, ValueError) else one_line(error)
            _reply(sock, {"fatal": text})
            return
        _reply(sock, {"ready": True})
        while (payload := _read(inbox)) is not None:
            _grade(sock, scorers, payload)


def _die_with(parent: int) -> None:
    # A function that hangs would not notice that the driver is gone.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)


def _read(inbox: IO[bytes]) -> bytes | None:
    header = inbox.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    return inbox.read(HEADER.unpack(header)[0])


def _reply(sock: socket.socket, message: dict[str, Any]) -> None:
    sock.sendall(frame(json.dumps(message, separators=(",", ":")).encode()))


def _grade(sock: socket.socket, scorers: Sequence[Scorer], payload: bytes) -> None:
    (job,) = JOB.unpack_from(payload)
    start = time.perf_counter()
    try:
        functions, requests = _job(payload)
        for function in functions:
            start = time.perf_counter()
            scores = scorers[function](requests)
            seconds = time.perf_counter() - start
            _reply(sock, {"job": job, "f": function, "s": seconds, "scores": scores})
    except BaseException as error:  # whatever the user's code raises is this sample's own
        _reply(sock, {"job": job, "s": time.perf_counter() - start, "error": one_line(error)})


def _job(payload: bytes) -> tuple[Sequence[int], list[GradeRequest]]:
    functions, requests = pickle.loads(memoryview(payload)[JOB.size :])
    return functions, [
        GradeRequest(
            attempt=AttemptId(attempt),
            prompt=prompt,
            completion=completion,
            completion_ids=ids,
            row=row,
        )
        for attempt, prompt, completion, ids, row in requests
    ]
