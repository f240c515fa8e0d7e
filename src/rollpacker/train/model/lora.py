"""LoRA adapters (Hu et al., 2021) through peft."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.pytorch_utils import Conv1D

from rollpacker.config import ModelConfig
from rollpacker.train.model.forward import is_composed, mixers_of, text_model_of

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

_ADAPTER = "default"


def add_adapters(model: PreTrainedModel, config: ModelConfig) -> PeftModel:
    """Put adapters on the linear layers of ``model``, in place, and freeze its own weights.

    The head and the outputs of Mamba's mixers, whose kernels take the bare weight, get none. A
    mixture of experts has them only on attention and other mixers, a composed model only on its
    text model. Every replica draws the same initial adapters. Saved adapters name ``config.path``
    as the base model, a folder by its absolute path.
    """
    settings = LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,  # pyright: ignore[reportArgumentType]
        target_modules=_targets(model),
        exclude_modules=_fused(model) or None,
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        # peft reads an attribute that transformers renames.
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing`")
        torch.manual_seed(0)
        adapted: Any = get_peft_model(model, settings)
    base = Path(config.path).expanduser()
    name = str(base.resolve()) if base.is_dir() else config.path
    adapted.peft_config[_ADAPTER].base_model_name_or_path = name
    return adapted.eval()


def _targets(model: PreTrainedModel) -> str | list[str]:
    """peft's ``target_modules``. ``all-linear`` would take fused experts and routers for linear
    layers. For known families it also takes any module with an expert's name for an expert."""
    text = text_model_of(model)
    mixture = any(hasattr(module, "experts") for module in text.modules())
    if not mixture and not is_composed(model):
        return "all-linear"
    inside = {id(m) for part in (_mixing(text) if mixture else [text]) for m in part.modules()}
    head = model.get_output_embeddings()
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module is not head and id(module) in inside
    ]


def adapter_widths(model: PreTrainedModel) -> int:
    """Sum of inputs and outputs of all layers with adapters. Times the rank, it is the adapters'
    size."""
    targets, bare, head = _targets(model), _fused(model), model.get_output_embeddings()
    return sum(
        sum(module.weight.shape)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear | Conv1D) and module is not head and name not in bare
        if isinstance(targets, str) or name in targets
    )


def _mixing(model: torch.nn.Module) -> list[torch.nn.Module]:
    attention = [
        module
        for module in model.modules()
        if "Attention" in type(module).__name__
        and not isinstance(module, GradientCheckpointingLayer)
    ]
    return attention + mixers_of(model)


def _fused(model: PreTrainedModel) -> list[str]:
    return [
        f"{name}.out_proj"
        for name, module in model.named_modules()
        if hasattr(module, "A_log") and hasattr(module, "D") and hasattr(module, "out_proj")
    ]


def engine_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A model to decode from, to be filled with ``adapters.merged_weights``. Call it before
    ``add_adapters``. Weights that adapters change have their own storage. Embeddings, head, norms
    and biases are those of ``model``."""
    head = model.get_output_embeddings()
    linear = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head]
    changed = {id(module.weight) for module in linear}
    shared: dict[int, Any] = {id(p): p for p in model.parameters() if id(p) not in changed}
    return copy.deepcopy(model, shared)


@contextmanager
def without_adapters(model: torch.nn.Module) -> Iterator[None]:
    """The base model alone inside. peft's own way also stops the adapters' gradients for that time,
    which FSDP would remember."""
    layers: list[Any] = [m for m in model.modules() if isinstance(m, LoraLayer)]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False
