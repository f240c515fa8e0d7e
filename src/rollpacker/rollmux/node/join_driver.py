"""The process that an agent starts on a job's other nodes: it connects to the driver."""

from __future__ import annotations

import os
import time

from rollpacker.processes.children import shielded
from rollpacker.rollmux.service.client.client import (
    DriverGate,
    MuxClient,
    MuxError,
    UnreachableError,
)
from rollpacker.runtime.cluster.agent import Agent

_POLL_S = 0.3


def serve_driver(client: MuxClient, job: str, attempt: int, rank: int) -> None:
    """Wait for the driver of an attempt, and start and end workers for it until it is done.

    Raises ``MuxError`` if the job has no such attempt any more, ``ValueError`` if its driver has
    another token, ``OSError`` or ``EOFError`` when the driver is gone.
    """
    gate = _gate(client, job, attempt)
    never, _ = os.pipe()
    # A request to end the job goes to its driver, which may save its work first.
    with shielded():
        Agent((gate.host, gate.port), gate.key, gate.names[rank]).serve(never)


def _gate(client: MuxClient, job: str, attempt: int) -> DriverGate:
    while True:
        try:
            return client.gate(job, attempt)
        except UnreachableError:
            continue
        except MuxError as error:
            if error.code != "no_gate":
                raise
            time.sleep(_POLL_S)
