"""What the programs of jobs print: agents send it, the daemon keeps it in files."""

from __future__ import annotations

import base64
import binascii
import os
from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import Response

from rollpacker.rollmux.service.api import answers, bodies
from rollpacker.rollmux.service.api import route_docs as docs
from rollpacker.rollmux.service.api.refused import Refused
from rollpacker.rollmux.service.commands.commands import job_record
from rollpacker.rollmux.service.commands.writer import Writer
from rollpacker.rollmux.service.http.routing import answered
from rollpacker.rollmux.service.state.attempts import ProgramRun
from rollpacker.rollmux.service.state.transaction_log import TransactionLog

MOST = 64 * 2**20
"""Bytes of an attempt that are kept here; its node has all of them while it runs."""
_PIECE = 256 * 1024


class Logs:
    """A file for each attempt.

    Args:
        folder: made where it is missing; what is in it may be deleted at any time.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def _path(self, job: str, number: int) -> Path:
        return self._folder / f"{job}.{number}.log"

    def have(self, job: str, number: int) -> int:
        """Bytes of an attempt."""
        path = self._path(job, number)
        return path.stat().st_size if path.exists() else 0

    def add(self, job: str, number: int, at: int, data: bytes) -> int:
        """Put what starts at byte ``at`` behind what is there, unless it is there already; how
        many bytes there are then."""
        self._folder.mkdir(mode=0o700, exist_ok=True)
        have = self.have(job, number)
        if at <= have < MOST:
            with self._path(job, number).open("ab") as file:
                file.write(data[have - at :])
        return self.have(job, number)

    def read(self, job: str, number: int, at: int) -> bytes:
        """A piece, from byte ``at`` on; negative counts from the end."""
        path = self._path(job, number)
        if not path.exists():
            return b""
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size + at) if at < 0 else min(at, size))
            return file.read(_PIECE)


def add(app: FastAPI, writer: Writer, logs: Logs) -> None:
    """The routes."""

    @app.post("/v1/jobs/{job}/attempts/{number}/log", **docs.PRINTED)
    async def printed(job: str, number: int, body: bodies.PrintedBody, _: bodies.Key) -> Response:
        """What a program printed, from its agent; what is there already is taken once."""
        await writer.read(lambda core: _attempt(core, job, number))
        try:
            data = base64.b64decode(body.data, validate=True)
        except binascii.Error as error:
            raise Refused(400, f"data: no base64: {error}") from error
        have = logs.add(job, number, body.at, data)
        return answered(200, answers.PrintedAnswer(have=have, full=have >= MOST))

    @app.get("/v1/jobs/{job}/log", **docs.LOG)
    async def log(
        job: str, attempt: bodies.Count | None = None, at: bodies.Position = 0
    ) -> Response:
        """A piece of what a job's program printed: of its last start, or of ``attempt``.

        It begins at byte ``at``; a negative one counts from the end.
        """
        found = await writer.read(lambda core: _attempt(core, job, attempt))
        data = logs.read(job, found.number, at)
        have = logs.have(job, found.number)
        begins = max(0, have + at) if at < 0 else min(at, have)
        told = answers.Log(
            attempt=found.number,
            node=found.node,
            code=found.code,
            at=begins,
            data=base64.b64encode(data).decode(),
            over=found.ended is not None and begins + len(data) >= have,
        )
        return answered(200, told)


def _attempt(core: TransactionLog, job: str, number: int | None) -> ProgramRun:
    """One of a job's, the last one for None. Raises ``Refused``."""
    started = job_record(core, job).program
    attempts = [] if started is None else started.attempts
    wanted = [each for each in attempts if number is None or each.number == number]
    if not wanted:
        which = "" if number is None else f" {number}"
        said = "was not started by agents" if started is None else f"has no attempt{which} (yet)"
        raise Refused(404, f"job {job} {said}", code="no_attempt")
    return wanted[-1]
