"""The entry point of a worker's process, and what is told of its death."""

from __future__ import annotations

import os
import traceback

from rollpacker.processes.children import keep_to_itself, shielded
from rollpacker.runtime.ipc.link import WorkerChannel
from rollpacker.runtime.messages import messages as msg
from rollpacker.runtime.messages.faults import Fault
from rollpacker.runtime.worker.colocated_worker import ColocatedWorker
from rollpacker.runtime.worker.engine_worker import engine_worker
from rollpacker.runtime.worker.train_worker import replica_worker
from rollpacker.runtime.worker.worker import Role, Send, Server, WorkerSpec


def main(channel: WorkerChannel, spec: WorkerSpec) -> None:
    """Entry point of the process: serve until told to stop or the driver is gone."""
    environment = spec.config.environment
    if environment is not None and environment.kind == "agent":
        keep_to_itself()
    if spec.cores:
        os.sched_setaffinity(0, spec.cores)
    # The process that this one was forked off may be the user's program's own, which is not.
    with shielded():
        server = Server(channel, spec.config.cluster.heartbeat_s)
        try:
            fault = _serve(server, spec)
            if fault is not None:
                server.send(msg.Died(fault=fault))
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return


def _role(spec: WorkerSpec, send: Send) -> Role:
    if spec.replica is None:
        return engine_worker(spec, send)
    if spec.engine is None:
        return replica_worker(spec, send)
    return ColocatedWorker(spec, send)


def _serve(server: Server, spec: WorkerSpec) -> Fault | None:
    """What the worker died of, if it did."""
    try:
        server.serve(lambda send: _role(spec, send))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        raise
    except ValueError as error:
        return Fault(kind="user", text=str(error))
    except Exception:
        return Fault(kind="crash", text=traceback.format_exc())
    return None
