"""Builds the trainer of a run's configuration."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from rollpacker.config import FSDPTrainerConfig, RunConfig
from rollpacker.train.model.loading import source

if TYPE_CHECKING:
    from rollpacker.train.trainer import Trainer

_ALONE = timedelta(minutes=30)
"""Time in which other members join an operation, as they may be decoding."""


def build_trainer(
    config: RunConfig,
    model: Any,
    tokenizer: Any,
    *,
    max_length: int,
    total_updates: int,
    rank: int = 0,
    members: int = 1,
    meeting: str = "",
) -> Trainer:
    """The configured trainer, over ``model``, which is whole and on its device.

    ``max_length`` is the longest response in tokens, ``total_updates`` that of the whole run. The
    ``members`` of a replica meet once at ``meeting`` (``mesh.store_at``). Raises ``ValueError`` for
    a model or configuration that cannot be trained.
    """
    # If a family never ties weights, vLLM keeps its head even if config.json says tied.
    ties = bool(getattr(model, "_tied_weights_keys", None))
    apart = config.engine.kind == "vllm" and not model.config.tie_word_embeddings
    if ties and apart and source(config.model.path)[1].tie_word_embeddings:
        raise ValueError(
            f"model.path={config.model.path}: its lm_head differs from its embeddings, and vLLM "
            "would drop it: set tie_word_embeddings to false in its config.json, or use "
            "engine.kind=mini"
        )
    arguments: dict[str, Any] = {
        "temperature": config.rollout.temperature,
        "max_length": max_length,
        "total_updates": total_updates,
        "lora": config.model,
    }
    if not isinstance(config.trainer, FSDPTrainerConfig):
        from rollpacker.train.trainer import Trainer

        return Trainer(model, tokenizer, config.train, **arguments)
    import torch.distributed as dist

    from rollpacker.train.fsdp import FSDPTrainer
    from rollpacker.train.mesh import store_at

    dist.init_process_group(
        "gloo" if model.device.type == "cpu" else "cpu:gloo,cuda:nccl",
        store=store_at(meeting, members, _ALONE),
        rank=rank,
        world_size=members,
        timeout=_ALONE,
    )
    group = dist.group.WORLD
    assert group is not None
    return FSDPTrainer(model, tokenizer, config.train, members=group, **arguments)
