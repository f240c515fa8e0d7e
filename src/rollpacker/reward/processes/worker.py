"""The grading process: the only place where reward functions run. It takes jobs in order and writes
one JSON reply per call. The driver checks the replies and never unpickles them."""

from __future__ import annotations

import contextlib
import pickle
import select
import socket
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cache, partial
from typing import Any

from rollpacker.core.codec import dumps
from rollpacker.core.types import AttemptId
from rollpacker.errors import told, way
from rollpacker.processes.children import die_with, take_no_notice
from rollpacker.processes.frames import HEADER, LARGEST_REPLY, Inbox, frame
from rollpacker.response_text import ResponseText
from rollpacker.reward.base import GradeRequest, GradingError, Scored, TrainerState
from rollpacker.reward.functions import Scorer, resolve
from rollpacker.reward.processes.process import JOB, Loaded, Row, load_row

# The driver as a grading process sees it: jobs come in, replies and signs of life go out.

_BEAT_S = 0.5


class Driver:
    """The other end of the socket. A job is a frame that begins with its number. A frame with only
    a number cancels that job."""

    def __init__(self, sock: socket.socket) -> None:
        self.checked = False  # whether another process has verified the sandbox on this machine
        self._sock = sock
        self._inbox = Inbox(HEADER, bytes)
        self._waiting: deque[bytes] = deque()
        self._cancelled: set[int] = set()
        self._running = -1
        self._beat = 0.0

    def next(self) -> bytes | None:
        """Wait for the next job, or None if the driver is gone."""
        while not self._waiting:
            if not self._receive():
                return None
        return self._waiting.popleft()

    def reply(self, message: dict[str, Any]) -> None:
        """Write one message. Raises ``GradingError`` if it is larger than the driver reads."""
        text = dumps(message)
        if len(text) > LARGEST_REPLY:
            raise GradingError(f"logged more than {LARGEST_REPLY >> 20} MiB in one call")
        self._sock.sendall(frame(text))

    def say(self, text: str) -> None:
        self.reply({"say": text})

    def begin(self, job: int) -> None:
        self._running = job
        self._beat = time.monotonic()

    def unwanted(self) -> bool:
        """Return whether the running job was cancelled. Also sends the driver a sign of life."""
        now = time.monotonic()
        if now - self._beat > _BEAT_S:
            self._beat = now
            self.reply({"beat": self._running})
        while select.select([self._sock], [], [], 0)[0]:
            if not self._receive():
                return True
        return self._running in self._cancelled

    def _receive(self) -> bool:
        try:
            count = self._inbox.receive(self._sock)
        except ConnectionResetError:  # the driver is gone and has not read everything
            count = 0
        for payload in self._inbox.whole():
            self._take(payload)
        return bool(count)

    def _take(self, payload: bytes) -> None:
        if len(payload) == JOB.size:
            self._cancelled = {JOB.unpack(payload)[0]}
        else:
            self._waiting.append(payload)


def main(descriptor: int, parent: int) -> None:
    """Serve the driver at the other end of the socket until it closes."""
    die_with(parent)
    take_no_notice()
    # A driver that has ended needs no reply.
    gone = contextlib.suppress(BrokenPipeError, ConnectionResetError)
    with gone, socket.socket(fileno=descriptor) as sock:
        driver = Driver(sock)
        functions: list[Loaded]
        functions, pickled, driver.checked = pickle.loads(driver.next() or b"")
        try:
            scorers = _scorers(functions, driver)
            read: ResponseText | None = pickle.loads(pickled)
        except BaseException as error:  # the user's module may even exit
            text = str(error) if isinstance(error, ValueError) else told(error)
            driver.reply({"fatal": text})
            return
        driver.reply({"ready": True})
        while (payload := driver.next()) is not None:
            _grade(driver, scorers, read, payload)


def _scorers(functions: Sequence[Loaded], driver: Driver) -> Mapping[int, Scorer]:
    # A sandbox is made before the user's modules are loaded: they may hold secrets.
    order = sorted(range(len(functions)), key=lambda i: functions[i][0] != "code")
    scorers: dict[int, Scorer] = {}
    for i in order:
        function, options, columns = functions[i]
        scorers[i] = resolve(function, options, driver, columns)
    return scorers


def _grade(
    driver: Driver,
    scorers: Mapping[int, Scorer],
    read: ResponseText | None,
    payload: bytes,
) -> None:
    (job,) = JOB.unpack_from(payload)
    driver.begin(job)
    start = time.perf_counter()
    try:
        functions, requests = _job(payload, read)
        for function in functions:
            start = time.perf_counter()
            scored = scorers[function](requests)
            seconds = time.perf_counter() - start
            driver.reply({"job": job, "f": function, "s": seconds} | _encode(scored))
    except BaseException as error:  # an error of the user's code fails this sample only
        seconds = time.perf_counter() - start
        driver.reply({"job": job, "s": seconds, "error": told(error), "way": way(error)})


def _encode(scored: Sequence[float | Scored | None]) -> dict[str, Any]:
    said = [each for each in scored if isinstance(each, Scored)]
    if not said:
        return {"scores": scored}
    scores = [each.score if isinstance(each, Scored) else each for each in scored]
    reply: dict[str, Any] = {"scores": scores}
    if runs := [asdict(each.run) for each in said if each.run is not None]:
        reply["runs"] = runs
    for key in ("extra", "metrics"):
        if any(getattr(each, key) for each in said):
            reply[key] = [dict(getattr(e, key)) if isinstance(e, Scored) else {} for e in scored]
    return reply


def _job(payload: bytes, read: ResponseText | None) -> tuple[Sequence[int], list[GradeRequest]]:
    functions, requests = pickle.loads(memoryview(payload)[JOB.size :])
    loaded: dict[str, Row] = {}  # requests of a call share their row
    return functions, [
        GradeRequest(
            attempt=AttemptId(attempt),
            prompt=prompt,
            # Decode once, on demand: functions that read token ids never ask.
            completion=cache(partial(read, ids)) if read else completion,
            completion_ids=ids,
            row=_loaded(row, loaded) if isinstance(row, str) else row,
            timeouts_s=timeouts,
            state=TrainerState(*state),
            messages=messages,
        )
        for attempt, prompt, completion, packed, row, timeouts, state, messages in requests
        for ids in [memoryview(packed).cast("i").tolist()]
    ]


def _loaded(path: str, loaded: dict[str, Row]) -> Row:
    return loaded.get(path) or loaded.setdefault(path, load_row(path))
