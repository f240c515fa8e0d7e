"""An engine and a training replica on one device, over the same weights.

With LoRA the engine has a model of its own, which every step fills with the merged weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rollpacker.config import RunConfig
from rollpacker.config.rollout import FakeEngineConfig, MiniEngineConfig
from rollpacker.runtime import messages as msg
from rollpacker.runtime.engine_worker import EngineWorker
from rollpacker.runtime.train_worker import TrainWorker
from rollpacker.runtime.worker import Commands, Send, WorkerSpec

if TYPE_CHECKING:
    from rollpacker.engine.base import Engine


class ColocatedWorker:
    """Decodes while it has attempts, sums gradients while it has none."""

    def __init__(self, spec: WorkerSpec, send: Send) -> None:
        import torch
        from transformers.utils import logging

        from rollpacker.train.local import LocalTrainer
        from rollpacker.train.model import load_model

        logging.disable_progress_bar()
        config = spec.config
        torch.set_num_threads(config.workers.threads)
        torch.manual_seed(config.seed)
        model, tokenizer = load_model(config.model, spec.device)
        engine = build_engine(config, _decoded(config, model), tokenizer)
        info = engine.info()
        trainer = LocalTrainer(
            model,
            tokenizer,
            config.train,
            temperature=config.rollout.temperature,
            max_length=spec.max_length,
            total_updates=spec.total_updates,
            lora=config.model,
        )
        self._engine = EngineWorker(
            engine,
            send,
            lambda: None if trainer.shares_weights else trainer.weights(),
            lockstep=config.deterministic,
        )
        self._trainer = TrainWorker(trainer, send)
        self.commands: Commands = {**self._engine.commands, **self._trainer.commands}
        send(msg.Ready(info=info))

    @property
    def progress(self) -> int:
        """Decode steps and gradient tasks so far."""
        return self._engine.progress + self._trainer.progress

    def busy(self) -> bool:
        """Whether either has something to do."""
        return self._engine.busy() or self._trainer.busy()

    def work(self) -> None:
        """Decode first: whoever waits for the tail waits for all."""
        (self._engine if self._engine.busy() else self._trainer).work()


def _decoded(config: RunConfig, model: Any) -> Any:
    """The model that the engine decodes from: the trained one, or one for its merged adapters."""
    if config.model.lora_rank == 0:
        return model
    from rollpacker.train.lora import engine_copy

    return engine_copy(model)


def build_engine(config: RunConfig, model: Any, tokenizer: Any) -> Engine:
    """The configured engine over ``model``."""
    match config.engine:
        case MiniEngineConfig():
            from rollpacker.engine.mini import MiniEngine

            return MiniEngine(
                model,
                config=config.engine,
                tokenizer=tokenizer,
                deterministic=config.deterministic,
                sharers=config.workers.per_gpu,
            )
        case FakeEngineConfig():
            from rollpacker.engine.fake import FakeEngine

            return FakeEngine(config.engine)
