"""The grading process: the only place where reward functions run.

It takes jobs in order and writes one reply per call, as JSON: what it writes is checked by the
driver and never unpickled.
"""

from __future__ import annotations

import contextlib
import pickle
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cache, partial
from typing import Any

from rollpacker.core.types import AttemptId
from rollpacker.errors import told, way
from rollpacker.processes.children import die_with
from rollpacker.processes.shield import take_no_notice
from rollpacker.response_text import ResponseText
from rollpacker.reward.base import GradeRequest, Scored, TrainerState
from rollpacker.reward.functions import Scorer, resolve
from rollpacker.reward.processes.driver import Driver
from rollpacker.reward.processes.process import JOB, Loaded
from rollpacker.reward.processes.rows import load_row


def main(descriptor: int, parent: int) -> None:
    """Serve the driver at the other end of the socket until it closes."""
    die_with(parent)
    take_no_notice()
    # A driver that has gone meanwhile needs no reply.
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
    except BaseException as error:  # whatever the user's code raises is this sample's own
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
    loaded = cache(load_row)  # requests of a call share their row
    return functions, [
        GradeRequest(
            attempt=AttemptId(attempt),
            prompt=prompt,
            # Once, when a function asks for it: one that reads token ids never does.
            completion=cache(partial(read, ids)) if read else completion,
            completion_ids=ids,
            row=loaded(row) if isinstance(row, str) else row,
            timeouts_s=timeouts,
            state=TrainerState(*state),
            messages=messages,
        )
        for attempt, prompt, completion, packed, row, timeouts, state, messages in requests
        for ids in [memoryview(packed).cast("i").tolist()]
    ]
