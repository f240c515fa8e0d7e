"""An engine and a training replica, or a part of one, in one process on one device.

They are over the same weights where they can: with LoRA and with sharded weights the engine has a
model of its own, which every step fills.
"""

from __future__ import annotations

import copy
from typing import Any

from rollpacker.config import FSDPTrainerConfig, RunConfig
from rollpacker.engine.configured import build_engine
from rollpacker.runtime.messages import messages as msg
from rollpacker.runtime.worker.engine_worker import EngineWorker, measured
from rollpacker.runtime.worker.train_worker import TrainWorker, train_worker, trainer_of
from rollpacker.runtime.worker.worker import Commands, Send, WorkerSpec, prepared


class ColocatedWorker:
    """Decodes while it has attempts, sums gradients while it has none."""

    def __init__(self, spec: WorkerSpec, send: Send) -> None:
        config = spec.config
        model, tokenizer = prepared(spec)
        decoded = _decoded(config, model)
        engine = build_engine(config, decoded, tokenizer, spec.device, alone=False)
        info = measured(engine, send, spec.max_length)
        trainer = trainer_of(spec, model, tokenizer)
        shared = trainer.shares_weights
        self._engine = EngineWorker(
            engine,
            send,
            lambda: None if shared else trainer.weights(),
            lockstep=config.deterministic,
        )
        self._trainer = train_worker(spec, trainer, send)
        self.commands: Commands = {**self._engine.commands, **self._trainer.commands}
        send(msg.Ready(info=info))

    @property
    def _next(self) -> EngineWorker | TrainWorker:
        """Decode first: whoever waits for the tail waits for all."""
        return self._engine if self._engine.busy() else self._trainer

    @property
    def at(self) -> str:
        return self._next.at

    def busy(self) -> bool:
        """Whether either has something to do."""
        return self._next.busy()

    def work(self) -> bool | None:
        return self._next.work()

    def close(self) -> None:
        self._engine.close()
        self._trainer.close()


def _decoded(config: RunConfig, model: Any) -> Any:
    """The model that the engine decodes from: the trained one, or one for its merged adapters or
    gathered weights."""
    if isinstance(config.trainer, FSDPTrainerConfig):
        return copy.deepcopy(model)
    if config.model.lora_rank == 0:
        return model
    from rollpacker.train.model.lora import engine_copy

    return engine_copy(model)
