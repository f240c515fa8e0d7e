"""The grading process: the only place where reward functions run.

It takes jobs in order and writes one reply per call, as JSON: what it writes is checked by the
driver and never unpickled.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rollpacker.core.types import AttemptId
from rollpacker.reward.base import GradeRequest, Scored
from rollpacker.reward.driver import Driver
from rollpacker.reward.functions import Scorer, one_line, resolve
from rollpacker.reward.shield import take_no_notice
from rollpacker.reward.wire import JOB

_PR_SET_PDEATHSIG = 1


def main(descriptor: int, parent: int) -> None:
    """Serve the driver at the other end of the socket until it closes."""
    _die_with(parent)
    take_no_notice()
    with socket.socket(fileno=descriptor) as sock:
        driver = Driver(sock)
        functions: list[tuple[str, dict[str, Any]]]
        functions, driver.checked = pickle.loads(driver.next() or b"")
        try:
            scorers = _scorers(functions, driver)
        except BaseException as error:  # the user's module may even exit
            text = str(error) if isinstance(error, ValueError) else one_line(error)
            driver.reply({"fatal": text})
            return
        driver.reply({"ready": True})
        while (payload := driver.next()) is not None:
            _grade(driver, scorers, payload)


def _die_with(parent: int) -> None:
    # A function that hangs would not notice that the driver is gone.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)


def _scorers(
    functions: Sequence[tuple[str, dict[str, Any]]], driver: Driver
) -> Mapping[int, Scorer]:
    # A sandbox is made before the user's modules are loaded: they may hold secrets.
    order = sorted(range(len(functions)), key=lambda i: functions[i][0] != "code")
    return {i: resolve(*functions[i], driver) for i in order}


def _grade(driver: Driver, scorers: Mapping[int, Scorer], payload: bytes) -> None:
    (job,) = JOB.unpack_from(payload)
    driver.begin(job)
    start = time.perf_counter()
    try:
        functions, requests = _job(payload)
        for function in functions:
            start = time.perf_counter()
            scored = scorers[function](requests)
            seconds = time.perf_counter() - start
            driver.reply({"job": job, "f": function, "s": seconds} | _encode(scored))
    except BaseException as error:  # whatever the user's code raises is this sample's own
        driver.reply({"job": job, "s": time.perf_counter() - start, "error": one_line(error)})


def _encode(scored: Sequence[float | Scored | None]) -> dict[str, Any]:
    scores = [each.score if isinstance(each, Scored) else each for each in scored]
    runs = [asdict(each.run) for each in scored if isinstance(each, Scored)]
    return {"scores": scores, "runs": runs} if runs else {"scores": scores}


def _job(payload: bytes) -> tuple[Sequence[int], list[GradeRequest]]:
    functions, requests = pickle.loads(memoryview(payload)[JOB.size :])
    return functions, [
        GradeRequest(
            attempt=AttemptId(attempt),
            prompt=prompt,
            completion=completion,
            completion_ids=ids,
            row=row,
            timeouts_s=timeouts,
        )
        for attempt, prompt, completion, ids, row, timeouts in requests
    ]
