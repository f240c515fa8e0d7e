"""A worker's process: its entry point, its role, and the report of its death."""

from __future__ import annotations

import copy
import os
import traceback
from typing import Any

from rollpacker.config import FSDPTrainerConfig, RunConfig
from rollpacker.engine.configured import build_engine
from rollpacker.processes.children import keep_to_itself, shielded
from rollpacker.runtime.ipc.link import Wire
from rollpacker.runtime.messages import messages as msg
from rollpacker.runtime.messages.faults import Fault
from rollpacker.runtime.worker.engine_worker import EngineWorker, engine_worker, measured
from rollpacker.runtime.worker.train_worker import TrainWorker, train_worker
from rollpacker.runtime.worker.worker import Commands, Role, Send, Server, WorkerSpec, prepared


class ColocatedWorker:
    """An engine and a training replica, or a rank of one. With LoRA or sharded weights the engine
    has its own model, which every step fills. Otherwise both use the same weights."""

    def __init__(self, spec: WorkerSpec, send: Send) -> None:
        config = spec.config
        model, tokenizer = prepared(spec)
        decoded = _decoded(config, model)
        engine = build_engine(config, decoded, tokenizer, spec.device, alone=False)
        info = measured(engine, send, spec.max_length)
        self._trainer = train_worker(spec, model, tokenizer, send)
        trainer = self._trainer.trainer
        self._engine = EngineWorker(
            engine,
            send,
            lambda: None if trainer.shares_weights else trainer.weights(),
            lockstep=config.deterministic,
        )
        self.commands: Commands = {**self._engine.commands, **self._trainer.commands}
        send(msg.Ready(info=info))

    @property
    def _next(self) -> EngineWorker | TrainWorker:
        """Decode first, as a step waits for its last response."""
        return self._engine if self._engine.busy() else self._trainer

    @property
    def at(self) -> str:
        return self._next.at

    def busy(self) -> bool:
        return self._next.busy()

    def work(self) -> bool | None:
        return self._next.work()

    def close(self) -> None:
        self._engine.close()
        self._trainer.close()


def _decoded(config: RunConfig, model: Any) -> Any:
    """The engine's model: the trained one, or a copy for merged adapters or gathered weights."""
    if isinstance(config.trainer, FSDPTrainerConfig):
        return copy.deepcopy(model)
    if config.model.lora_rank == 0:
        return model
    from rollpacker.train.model.lora import engine_copy

    return engine_copy(model)


def main(channel: Wire, spec: WorkerSpec) -> None:
    """Entry point of the process: serve until ``Stop`` or the driver's end."""
    environment = spec.config.environment
    if environment is not None and environment.kind == "agent":
        keep_to_itself()
    if spec.cores:
        os.sched_setaffinity(0, spec.cores)
    # The process that this one was forked off may be a user's program without shielded signals.
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
        worker = train_worker(spec, *prepared(spec), send)
        send(msg.Ready())
        return worker
    return ColocatedWorker(spec, send)


def _serve(server: Server, spec: WorkerSpec) -> Fault | None:
    try:
        server.serve(lambda send: _role(spec, send))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        raise
    except ValueError as error:
        return Fault(kind="user", text=str(error))
    except Exception:
        return Fault(kind="crash", text=traceback.format_exc())
    return None
