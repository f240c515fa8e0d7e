"""An engine and a training replica, or a part of one, on one device.

They are over the same weights where they can: with LoRA, sharded weights and vLLM the engine has a
model of its own, which every step fills.
"""

from __future__ import annotations

import copy
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from rollpacker.config import FSDPTrainerConfig, RunConfig
from rollpacker.config.rollout import FakeEngineConfig, MiniEngineConfig, VllmEngineConfig
from rollpacker.runtime import messages as msg
from rollpacker.runtime.engine_worker import EngineWorker
from rollpacker.runtime.train_worker import TrainWorker
from rollpacker.runtime.worker import Commands, Send, WorkerSpec

if TYPE_CHECKING:
    from rollpacker.engine.base import Engine
    from rollpacker.train.trainer import Trainer

_ALONE = timedelta(minutes=30)
"""In which the others of a replica join an operation: they may be decoding."""


class ColocatedWorker:
    """Decodes while it has attempts, sums gradients while it has none."""

    def __init__(self, spec: WorkerSpec, send: Send) -> None:
        import torch
        from transformers.utils import logging

        from rollpacker.train.model import load_model

        logging.disable_progress_bar()
        config = spec.config
        torch.set_num_threads(config.workers.threads)
        torch.manual_seed(config.seed)
        model, tokenizer = load_model(config.model, spec.device)
        engine = build_engine(config, _decoded(config, model), tokenizer, spec.device)
        info = engine.info()
        trainer = _trainer(spec, model, tokenizer)
        shared = trainer.shares_weights and not isinstance(config.engine, VllmEngineConfig)
        self._engine = EngineWorker(
            engine,
            send,
            lambda: None if shared else trainer.weights(),
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
    """The model that the engine decodes from: the trained one, or one for its merged adapters or
    gathered weights."""
    if isinstance(config.engine, VllmEngineConfig):
        return model
    if isinstance(config.trainer, FSDPTrainerConfig):
        return copy.deepcopy(model)
    if config.model.lora_rank == 0:
        return model
    from rollpacker.train.lora import engine_copy

    return engine_copy(model)


def _trainer(spec: WorkerSpec, model: Any, tokenizer: Any) -> Trainer:
    config = spec.config
    arguments: dict[str, Any] = {
        "temperature": config.rollout.temperature,
        "max_length": spec.max_length,
        "total_updates": spec.total_updates,
        "lora": config.model,
    }
    if not isinstance(config.trainer, FSDPTrainerConfig):
        from rollpacker.train.local import LocalTrainer

        return LocalTrainer(model, tokenizer, config.train, **arguments)
    import torch.distributed as dist

    from rollpacker.train.fsdp import FSDPTrainer

    dist.init_process_group(
        "gloo" if spec.device == "cpu" else "cpu:gloo,cuda:nccl",
        init_method=f"file://{spec.meeting}",
        rank=spec.member,
        world_size=spec.members,
        timeout=_ALONE,
    )
    members = dist.group.WORLD
    assert members is not None
    return FSDPTrainer(model, tokenizer, config.train, members=members, **arguments)


def build_engine(config: RunConfig, model: Any, tokenizer: Any, device: str = "cpu") -> Engine:
    """The configured engine, over ``model`` if it can share one.

    Raises ``ValueError`` for a model that it cannot run, and where it is not installed.
    """
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
        case VllmEngineConfig():
            try:
                from rollpacker.engine.vllm import VllmEngine
            except ImportError as error:
                raise ValueError(
                    f"engine.kind=vllm: vLLM cannot be imported ({error}): "
                    "pip install 'rollpacker[vllm]', or set engine.kind=mini"
                ) from None
            return VllmEngine(
                config.model,
                config=config.engine,
                tokenizer=tokenizer,
                device=device,
                sharers=config.workers.per_gpu,
            )
        case FakeEngineConfig():
            from rollpacker.engine.fake import FakeEngine

            return FakeEngine(config.engine)
