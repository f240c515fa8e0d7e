"""Where the processes of an attempt meet: its driver says it, those on the job's other nodes ask.

Kept in memory only: whoever has met needs it no more, and a driver says it again (``MuxLauncher``).
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.responses import Response

from rollpacker.rollmux.service.api import bodies
from rollpacker.rollmux.service.api import route_docs as docs
from rollpacker.rollmux.service.api.refused import Refused
from rollpacker.rollmux.service.commands.commands import job_record, own_job
from rollpacker.rollmux.service.commands.writer import Writer
from rollpacker.rollmux.service.http.routing import answered
from rollpacker.rollmux.service.state.attempts import ProgramRun
from rollpacker.rollmux.service.state.transaction_log import TransactionLog


def add(app: FastAPI, writer: Writer) -> None:
    """The routes."""
    gates: dict[str, tuple[int, dict[str, Any]]] = {}

    @app.post("/v1/jobs/{job}/gate", **docs.GATE_OPENED)
    async def opened(job: str, body: bodies.GateBody, asked: bodies.Key) -> Response:
        """The driver of a job's running attempt says where its other processes find it."""

        def running(core: TransactionLog) -> ProgramRun:
            own_job(core, asked)
            return _running(core, job)

        gates[job] = (await writer.read(running)).number, body.model_dump()
        return answered(200, {})

    @app.get("/v1/jobs/{job}/gate", **docs.GATE)
    async def gate(job: str, attempt: int) -> Response:
        """Where the driver of an attempt is, for processes that its agents have started."""
        number, found = gates.get(job, (0, {}))
        if number != attempt:
            await writer.read(lambda core: _running(core, job))
            raise Refused(404, f"job {job}: the driver has not opened a gate yet", code="no_gate")
        return answered(200, found)


def _running(core: TransactionLog, job: str) -> ProgramRun:
    running = job_record(core, job).running
    if running is None:
        raise Refused(404, f"job {job}: agents run nothing of it", code="no_attempt")
    return running
